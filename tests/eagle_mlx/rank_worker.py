"""One rank of a sharded target, started by test_ranks.py: decode, and compare with the whole target."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import eagle_mlx as em

import mlx.core as mx  # isort: skip
import mlx.nn as nn

from eagle_mlx.cache.tree_support import why_no_trees
from eagle_mlx.catalog import embedded
from eagle_mlx.engine import Engine
from eagle_mlx.errors import TargetError
from eagle_mlx.plan import Context, Plan, RoundResult
from eagle_mlx.ranks import ProcessGroup
from eagle_mlx.ranks.channel import Channel
from eagle_mlx.ranks.commands import LeadingTarget, follow
from eagle_mlx.ranks.load import shard_layers, shard_tensors
from eagle_mlx.request_state import RequestState
from eagle_mlx.serve.bench.measure import compare
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.target import Target
from tests.architectures import VOCAB, tiny_model
from tests.eagle_mlx.heads import IN_BLOCKS
from tests.fakes import Oracle, tiny_head
from tests.full import in_full

FEW = [[1, 2, 3, 4, 5], [9], [7, 8, 7, 8, 7, 8, 7], [*range(40)], [90, 3]]
_RNG = random.Random(0)
MORE = [[_RNG.randrange(1, VOCAB) for _ in range(_RNG.randrange(1, 33))] for _ in range(35)]
PROMPTS = in_full([*FEW, *MORE], FEW)
LENGTH = in_full(12, 8)


BY_DRAFT_MODEL = Plan(5)
"""The plan that rank 0's own draft model drafts. Other chains are guessed from the known texts."""


@dataclass
class Always:
    """A policy with a fixed plan."""

    next: Plan

    @property
    def wants_trees(self) -> bool:
        return self.next.is_tree

    def plan(self, context: Context) -> Plan:
        return self.next if context.can.trees or not self.next.is_tree else Plan(self.next.depth)

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""


BY_THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 96}


def whole_model(name: str, ranks: int = 2, **changes: int) -> nn.Module:
    """Return the same model in every process, with numbers of heads that `ranks` divides."""
    mx.random.seed(7)
    model = tiny_model(name, **(BY_THREE if ranks == 3 else {}), **changes)
    mx.eval(model.parameters())
    return model


def led(
    world: ProcessGroup,
    model: nn.Module,
    work: Callable[[LeadingTarget], Any],
    channel: Channel | None = None,
    shard: str = "tensor",
    tokenizer: Any = None,
) -> Any:
    """Return the result of `work` on rank 0 with a sharded target; None on other ranks.

    Without a tokenizer no token ends a text.
    """
    assert world.group is not None
    (shard_tensors if shard == "tensor" else shard_layers)(model, world.group)
    channel, target = channel or Channel(world), Target(model, tokenizer, "tiny")
    layers = None if shard == "tensor" else sum(world.all_values(target.num_layers))
    channel.watch()
    if not world.is_rank_zero:
        follow(target, channel)
        return None
    leading = LeadingTarget.of(target, channel, layers=layers)
    try:
        return work(leading)
    finally:
        leading.close()


def sampling(seeded: bool) -> list[em.SamplingParams]:
    plain = em.SamplingParams(max_tokens=LENGTH, temperature=1.0 if seeded else 0.0, seed=5 if seeded else None)
    penalized = replace(plain, repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=True)
    return [penalized if index == 2 else plain for index in range(len(PROMPTS))]


def differences(
    whole: Target,
    params: Sequence[em.SamplingParams],
    texts: Any,
    tokens: Any,
    prompts: Sequence[list[int]] = PROMPTS,
) -> list[int]:
    """Return how many texts are equal, equal except for rounding, and different."""
    same = compare(whole, prompts, texts, tokens, params)
    return [same.identical, same.excused, same.different]


def plain_texts(
    whole: Target, params: list[em.SamplingParams], prompts: Sequence[list[int]] = PROMPTS, kv_bits: int | None = None
) -> list[list[int]]:
    engine = Engine(whole, max_batch=1, kv_bits=kv_bits, kv_bytes=1 << 28)
    return [output.tokens for output in engine.generate(prompts, params)]


def decodings(whole: Target, target: LeadingTarget, plans: Sequence[Sequence[Plan]]) -> dict[str, list[int]]:
    """Compare texts in several modes with the whole target's plain ones: greedy, then seeded by exact engines."""
    comparisons = {}
    for seeded, own in enumerate(plans):
        if not own:
            continue
        params = sampling(bool(seeded))
        texts = plain_texts(whole, params)
        text_of = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}
        for plan in own:
            for rows in in_full((1, 4), (1,) if seeded else (4,)):
                read = (0, 1) if target.has_all_layers else ()
                proposer: Any = Oracle(text_of, wrong=0.3, aux_layers=read) if plan.depth else None
                if plan == BY_DRAFT_MODEL:
                    proposer = em.DraftModelProposer(whole)
                if plan.stop_below is not None:
                    proposer = em.HeadProposer((IN_BLOCKS["dspark"] if seeded else tiny_head)(whole))
                engine = Engine(
                    target,
                    proposer,
                    policy=Always(plan),
                    max_batch=rows,
                    prefill_chunk=16,
                    kv_bytes=1 << 28,
                    exact=bool(seeded),
                )
                outputs = engine.generate(PROMPTS, params)
                tokens = [output.tokens for output in outputs]
                comparisons[f"{'seeded' if seeded else 'greedy'} {plan} rows={rows}"] = [
                    *differences(whole, params, texts, tokens),
                    sum(output.accepted for output in outputs),
                ]
    return comparisons


def architectures(world: ProcessGroup, shard: str, *names: str) -> dict[str, Any] | None:
    """For each architecture, compare texts with those of one process, or return why it cannot be sharded.

    Ranks but the first return None.
    """
    results: dict[str, Any] = {}
    for number, name in enumerate(names):
        whole = Target(whole_model(name, world.size), None, "whole")
        plan = Plan(3) if why_no_trees(whole) else Plan(3, nodes=7)
        turn = (number + (shard == "pipeline")) % 2
        plans = in_full([[plan]] * 2, [[], [plan]] if turn else [[plan], []])
        try:
            results[name] = led(
                world, whole_model(name, world.size), partial(decodings, whole, plans=plans), shard=shard
            )
        except TargetError as e:
            results[name] = str(e)
    return results if world.is_rank_zero else None


def every_way(world: ProcessGroup, shard: str, name: str) -> dict[str, Any]:
    """Decode one architecture with plain rounds, chains, a draft model, trees and, if a head can read its layers,
    early exits.

    Unless in full, tensors decode greedily where layers decode with seeds.
    """
    whole = Target(whole_model(name, world.size), None, "whole")
    plain, *others = Plan(0), Plan(4), BY_DRAFT_MODEL, Plan(3, nodes=9)
    exits = [Plan(6, stop_below=0.02)] if shard == "tensor" else []
    halves = [[plain, *exits], [*others, *exits]] if shard == "tensor" else [others, [plain]]
    plans = in_full([[plain, *others, *exits]] * 2, halves)
    model = whole_model(name, world.size)
    return cast(dict[str, Any], led(world, model, partial(decodings, whole, plans=plans), shard=shard))


def given(world: ProcessGroup, folder: str, head: str) -> dict[str, Any]:
    """Decode forty prompts with a target in a folder and its head, in four rows and one by one."""
    whole, count = em.load_target(folder, mx.float32), 8
    questions = read_questions(embedded("prompts.jsonl"), 40)
    prompts = [question.encode(whole, max_tokens=count)[-64:] for question in questions]
    greedy = [em.SamplingParams(max_tokens=count, temperature=0.0)] * len(prompts)
    seeded = [em.SamplingParams(max_tokens=count, temperature=1.0, seed=seed) for seed in range(len(prompts))]
    ways = [(greedy, Plan(0), 4), (greedy, Plan(4), 4), (greedy, Plan(3, nodes=9), 4), (greedy, Plan(4), 1)]
    ways += [(greedy, Plan(6, stop_below=0.3), 4), (seeded, Plan(4), 4), (seeded, Plan(4), 1)]

    def work(target: LeadingTarget) -> dict[str, list[int]]:
        results, texts = {}, [plain_texts(whole, params, prompts) for params in (greedy, seeded)]
        for params, plan, rows in ways:
            engine = Engine(
                target,
                em.HeadProposer(em.load_head(head, target)),
                policy=Always(plan),
                max_batch=rows,
                kv_bytes=1 << 28,
            )
            outputs = engine.generate(prompts, params)
            same = differences(whole, params, texts[params is seeded], [output.tokens for output in outputs], prompts)
            name = f"{'seeded' if params is seeded else 'greedy'} {plan} rows={rows}"
            results[name] = [*same, sum(output.accepted for output in outputs)]
        return results

    return cast(dict[str, Any], led(world, em.load_target(folder, mx.float32).model, work, tokenizer=whole.tokenizer))


def life(world: ProcessGroup, shard: str, name: str, kv_bits: str = "") -> dict[str, Any]:
    """Requests come and go at any time, with a prefix cache, the throughput policy and optionally a quantized cache."""
    wide = {"head_dim": 64} if kv_bits else {}
    whole = Target(whole_model(name, world.size, **wide), None, "whole")
    bits = int(kv_bits) if kv_bits else None

    def work(target: LeadingTarget) -> dict[str, Any]:
        params = sampling(True)
        texts = plain_texts(whole, params, kv_bits=bits)
        text_of = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}
        longer = [*PROMPTS[3], *texts[3], 1]
        text_of[tuple(longer)] = []
        engine = Engine(
            target,
            Oracle(text_of, 0.3),
            policy=None,
            max_batch=3,
            prefill_chunk=8,
            prefix_cache_bytes=1 << 24,
            kv_bits=bits,
            kv_bytes=1 << 28,
        )
        ended = [joined_and_cancelled(engine, params, turn) for turn in range(in_full(3, 1))]
        again = engine.generate([longer], params[0])[0]
        before = target.channel.messages
        engine.generate(PROMPTS[:2], params[:2])
        return {
            "equal": [differences(whole, params, texts, tokens) for tokens in ended],
            "cached": again.cached_tokens,
            "messages": target.channel.messages - before,
        }

    return cast(dict[str, Any], led(world, whole_model(name, world.size, **wide), work, shard=shard))


def joined_and_cancelled(engine: Engine, params: list[em.SamplingParams], turn: int) -> list[list[int]]:
    """Return texts of requests that join while others decode. Other requests are cancelled in between."""
    requests: list[RequestState] = []
    cancelled: list[RequestState] = []
    step = 0
    while len(requests) < len(PROMPTS) or not engine.idle:
        if step % 2 == 0 and len(requests) < len(PROMPTS):
            requests.append(engine.prepare(PROMPTS[len(requests)], params[len(requests)]))
            engine.submit(requests[-1])
        if step % 3 == turn:
            cancelled.append(engine.prepare(PROMPTS[step % len(PROMPTS)], params[0]))
            engine.submit(cancelled[-1])
        engine.step()
        if step % 3 == 2 and cancelled:
            engine.cancel(cancelled.pop())
        step += 1
        if step > 8 * len(PROMPTS):
            for request in cancelled:
                engine.cancel(request)
    return [request.tokens for request in requests]


def idle(world: ProcessGroup) -> dict[str, Any]:
    """Return the CPU share of the last rank during at least one idle second."""
    heard = []

    class Watched(Channel):
        def receive(self) -> Any:
            message = super().receive()
            heard.append((time.monotonic(), time.process_time()))
            return message

    def work(target: LeadingTarget) -> None:
        Engine(target, kv_bytes=1 << 28).generate([PROMPTS[0]], em.SamplingParams(max_tokens=4, ignore_eos=True))
        time.sleep(4.0)  # a rank rests after a second without work, and is watched in the last second or two

    led(world, whole_model("qwen3", world.size), work, Watched(world))
    if world.is_rank_zero:
        return {}
    ended, done = heard[-1]
    began, worked = next(at for at in reversed(heard) if at[0] <= ended - 1)
    return {"worked": (done - worked) / (ended - began)}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank before one of its messages."""

    rank: int
    message: int
    kind: str
    """`kill`, `stop`, `exit`, or `delay`, which does not affect other ranks."""

    @classmethod
    def drawn(cls, seed: int, ranks: int) -> Fault:
        rng = random.Random(seed)
        return cls(rng.randrange(ranks), rng.randrange(1, 16), rng.choice(["kill", "stop", "exit", "delay"]))

    def happen(self, timeout: float) -> None:
        print(json.dumps({"fault": time.time()}), flush=True)
        if self.kind == "exit":
            os._exit(3)
        elif self.kind == "delay":
            time.sleep(timeout / 3)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


class FaultyChannel(Channel):
    def __init__(self, world: ProcessGroup, timeout: float, fault: Fault):
        super().__init__(world, timeout)
        self.fault = fault

    def exchange(self, text: bytes) -> bytes:
        if self.world.rank == self.fault.rank and self.messages == self.fault.message:
            self.fault.happen(self.timeout)
        return super().exchange(text)


def faulty(world: ProcessGroup, seed: str, timeout: str, shard: str = "tensor") -> dict[str, Any]:
    """Decode texts until a rank is gone, or all of them."""
    name = "qwen3" if shard == "tensor" else "qwen2"
    whole, params = Target(whole_model(name, world.size), None, "whole"), sampling(True)[: len(FEW)]
    texts = plain_texts(whole, params, FEW)

    def work(target: LeadingTarget) -> dict[str, Any]:
        requests: list[RequestState] = []
        engine = Engine(target, em.NgramProposer(), policy=Always(Plan(2)), max_batch=3, kv_bytes=1 << 28)
        for prompt, choice in zip(FEW, params, strict=True):
            requests.append(engine.prepare(prompt, choice))
            engine.submit(requests[-1])
        while not engine.idle:
            for request in engine.step():
                index = requests.index(request)
                right = request.error is not None or request.tokens == texts[index]
                print(json.dumps({"request": index, "right": right}), flush=True)
        return {"messages": target.channel.messages}

    channel = FaultyChannel(world, float(timeout), Fault.drawn(int(seed), world.size))
    return cast(dict[str, Any], led(world, whole_model(name, world.size), work, channel, shard))


def main() -> None:
    """Run cases in order. Each argument is a case's name and its own arguments, separated by spaces."""
    world, functions = ProcessGroup.init(), (architectures, every_way, given, life, idle, faulty)
    cases: dict[str, Callable[..., Any]] = {case.__name__: case for case in functions}
    results = {}
    for argument in sys.argv[1:]:
        name, *arguments = argument.split(" ")
        results[argument] = cases[name](world, *arguments)
    print(json.dumps(results if any(result is not None for result in results.values()) else None))


if __name__ == "__main__":
    main()
