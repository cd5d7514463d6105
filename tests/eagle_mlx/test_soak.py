"""Many requests of all kinds that come and go: all end, and nothing is left over."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.request_state import RequestState
from tests.eagle_mlx.heads import IN_BLOCKS
from tests.fakes import tiny_head, tiny_target
from tests.full import in_full

REQUESTS, WARM_UP = in_full((2_000, 200), (70, 30))


def random_params(rng: np.random.Generator) -> em.SamplingParams:
    def sometimes(share: float, value: float, otherwise: float) -> float:
        return value if rng.random() < share else otherwise

    return em.SamplingParams(
        max_tokens=int(rng.integers(1, 24)),
        temperature=sometimes(0.5, 0.8, 0.0),
        seed=int(rng.integers(1 << 30)) if rng.random() < 0.5 else None,
        top_p=sometimes(0.3, 0.9, 1.0),
        top_k=int(sometimes(0.3, 10, 0)),
        min_p=sometimes(0.2, 0.05, 0.0),
        repetition_penalty=sometimes(0.2, 1.3, 1.0),
        presence_penalty=sometimes(0.2, 0.5, 0.0),
        logit_bias={5: 3.0} if rng.random() < 0.1 else {},
        top_logprobs=int(sometimes(0.1, 3, 0)),
        logits_processors=(lambda tokens, logits: logits * 1,) if rng.random() < 0.05 else (),
        num_speculative_tokens=int(rng.integers(4)) if rng.random() < 0.3 else None,
    )


def serve(engine: em.Engine, count: int, rng: np.random.Generator) -> list[RequestState]:
    """Decode this many requests. A few arrive at a time, and some are cancelled."""
    rows: list[RequestState] = []
    while len(rows) < count or not engine.idle:
        if len(rows) < count and engine.waiting < 8:
            for _ in range(min(int(rng.integers(1, 6)), count - len(rows))):
                prompt = [int(t) for t in rng.integers(3, 128, int(rng.integers(1, 50)))]
                rows.append(engine.prepare(prompt, random_params(rng)))
                engine.submit(rows[-1])
        if rng.random() < 0.1:
            engine.cancel(rows[-1 - int(rng.integers(min(10, len(rows))))])
        if rng.random() < 0.1:
            engine.pause(rows[-1 - int(rng.integers(min(10, len(rows))))])
        engine.step()
    return rows


@pytest.mark.parametrize("kind", in_full(["eagle3", *IN_BLOCKS], ["dspark"]))
def test_many_requests_leak_nothing(kind: str) -> None:
    target, rng = tiny_target(layers=3), np.random.default_rng(0)
    head = em.HeadProposer({"eagle3": tiny_head, **IN_BLOCKS}[kind](target))
    engine = em.Engine(target, em.HybridProposer(head), max_batch=8, prefill_chunk=16, prefix_cache_bytes=1 << 20)
    memory, rows = [], []
    for count in (WARM_UP, REQUESTS - WARM_UP):
        rows += serve(engine, count, rng)
        gc.collect()
        memory.append(mx.get_active_memory())
    assert {row.finish_reason for row in rows} == {"length", "cancelled"}
    assert all(len(row.tokens) == row.limit for row in rows if row.finish_reason == "length")
    assert engine.active == engine.waiting == 0
    assert memory[1] < 1.05 * memory[0], memory
