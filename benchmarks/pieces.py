"""Split a training step into pieces that can be run and timed separately, on the same streams as the step."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from eagle_mlx.blas import one_blas_thread
from eagle_mlx.cpu import default_streams, make_streams
from eagle_mlx.hidden_states import in_16_bits
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainSettings
from eagle_mlx.train.data import Rows, capture_rows
from eagle_mlx.train.kinds.eagle3 import attend, causal_mask
from eagle_mlx.train.step.inputs import make_plan
from eagle_mlx.train.step.losses import ChunkedLoss
from eagle_mlx.train.step.step import objective_of, part_arrays, part_loss, weights_of_steps


@dataclass(frozen=True)
class Time:
    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads, which other load changes least."""


def timed(run: Callable[[], Any]) -> Time:
    """Time a call."""
    cpu, begin = os.times(), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - begin, os.times()
    return Time(seconds, after.user + after.system - cpu.user - cpu.system)


class Pieces:
    """The pieces of an EAGLE-3 head's step. Methods return a call that computes one piece for a batch."""

    def __init__(self, head: Any, target: Target, config: TrainSettings):
        head.attach(target)
        self._head, self._target, self._config = head, target, config
        self._weights, self._objective = weights_of_steps(config), objective_of(config)
        self._streams = make_streams(config.run.streams or min(default_streams(), config.optimization.rows))

    def captured(self, rows: Rows) -> Rows:
        """Return the batch with hidden states, as shards provide them."""
        states = capture_rows(self._target, self._head.config.aux_layers, dataclasses.replace(rows, states=None))
        return dataclasses.replace(rows, states=np.array(in_16_bits(states)))

    def target_forward(self, rows: Rows) -> Callable[[], None]:
        """The frozen target's forward over the batch."""
        parts = dataclasses.replace(rows, states=None).split(len(self._streams))
        layers = self._head.config.aux_layers
        return self._on_streams(parts, lambda part: capture_rows(self._target, layers, part))

    def head_both_ways(self, rows: Rows) -> Callable[[], None]:
        """The head's forward, loss and gradient for a batch with hidden states."""

        def loss(arrays: dict[str, mx.array]) -> tuple[mx.array, ...]:
            return part_loss(self._head, self._target, arrays, self._objective)

        return self._on_streams(self._arrays(rows), lambda arrays: nn.value_and_grad(self._head, loss)(arrays))

    def vocabulary(self, rows: Rows) -> Callable[[], None]:
        """The part of that over the vocabulary: the target's distribution, logits, loss, and their gradient."""
        width, head = self._target.hidden_size, self._head
        weights = head.trainable_parameters()

        def loss(weights: Any, outputs: list[mx.array], arrays: dict[str, mx.array]) -> mx.array:
            head.update(weights)
            last = arrays["states"][..., -width:].reshape(-1, width)[arrays["labels"]].astype(self._target.dtype)
            judged = ChunkedLoss(head, self._target, last, arrays["weights"], self._objective)
            return judged(outputs, arrays["select"])[0]

        def piece(given: tuple[dict[str, mx.array], list[mx.array]]) -> Any:
            try:
                return mx.value_and_grad(loss, argnums=(0, 1))(weights, given[1], given[0])
            finally:
                head.update(weights)

        given = [(arrays, self._like(arrays, width)) for arrays in self._arrays(rows)]
        return self._on_streams(given, piece)

    def attention(self, rows: Rows) -> Callable[[], None]:
        """The part of that for attention of all draft steps and its gradient, without the projections."""
        config = self._head.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        given = []
        for arrays in self._arrays(rows):
            (b, count), length = arrays["positions"].shape, arrays["tokens"].shape[1]
            q, own = mx.random.normal((b, heads, count, dim)), mx.random.normal((b, kv_heads, count, dim))
            past = mx.random.normal((b, kv_heads, length, dim))
            mask = causal_mask(arrays["segments"], arrays["positions"])
            mx.eval(q, own, past, mask)
            given.append((q, past, own, mask))

        def attended(q: mx.array, past: mx.array, own: mx.array, mask: mx.array) -> mx.array:
            steps = range(len(self._weights))
            return sum((mx.sum(attend(q, past, past, mask, [(own, own)] * step)) for step in steps), mx.array(0.0))

        return self._on_streams(given, lambda part: mx.value_and_grad(attended, argnums=(0, 1, 2))(*part))

    def _arrays(self, rows: Rows) -> list[dict[str, mx.array]]:
        parts = rows.split(len(self._streams))
        plans = [make_plan(part, len(self._weights)) for part in parts]
        counts = np.sum([plan.counts for plan in plans], axis=0)
        scale = (self._weights / np.maximum(counts, 1)).astype(np.float32)
        made = [
            part_arrays(self._head, self._target, part, plan, scale) for part, plan in zip(parts, plans, strict=True)
        ]
        mx.eval(made)
        return made

    def _like(self, arrays: dict[str, mx.array], width: int) -> list[mx.array]:
        outputs = [mx.random.normal((*arrays["positions"].shape, width)) for _ in self._weights]
        mx.eval(outputs)
        return outputs

    def _on_streams(self, given: list[Any], piece: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            with one_blas_thread(len(self._streams) > 1):
                results = []
                for part, stream in zip(given, self._streams, strict=False):
                    with mx.stream(stream):
                        results.append(piece(part))
                mx.eval(results)

        return run
