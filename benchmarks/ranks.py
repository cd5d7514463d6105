"""Measure the cost of one rank deciding for all: rounds of a sharded target with and without messages.

    mlx.launch -n 2 --backend ring -- python benchmarks/ranks.py
    mlx.launch -n 3 --backend ring -- python benchmarks/ranks.py --target out/real/smollm2-135m-instruct --rows 1

Without messages, every rank runs its own engine over its part. Their sums are the same bit by bit, so with a fixed
depth they make the same decisions and stay in step. This is the least that sharding a target can cost. With messages,
only rank 0 decides and drafts, and the others follow as in `eagle-serve`. The two take turns, and each pair changes the
order. A head with random weights drafts four tokens per round.

With random weights, it also checks the estimate in docs/several-machines.md: the round of one process with its layers
divided by the ranks, plus two sums per layer. The layers' cost is the difference to a model of one layer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
import mlx.nn as nn
from random_model import MIDDLING, QWEN3_06B, TINY, Shape, random_model

from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.ranks import ProcessGroup
from eagle_mlx.ranks.channel import Channel
from eagle_mlx.ranks.commands import LeadingTarget, follow
from eagle_mlx.ranks.load import shard_tensors

DEPTH = 4
PROMPT = 32
SHAPES = {"tiny": TINY, "middling": MIDDLING, "0.6b": QWEN3_06B}


class CountingChannel(Channel):
    """Counts the time that rank 0 spends on messages."""

    seconds = 0.0

    def send(self, message: Any) -> None:
        began = time.perf_counter()
        super().send(message)
        self.seconds += time.perf_counter() - began


def decode(target: em.Target, head: Any, rows: int, tokens: int) -> tuple[float, int]:
    """Return seconds and rounds for decoding this many tokens per row after the prompts."""
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(DEPTH), max_batch=rows, kv_bytes=1 << 28)
    params = em.SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [engine.prepare([1 + row] * PROMPT, params) for row in range(rows)]
    for request in requests:
        engine.submit(request)
    while not all(request.tokens for request in requests):
        engine.step()
    began, rounds = time.perf_counter(), 0
    while not engine.idle:
        engine.step()
        rounds += 1
    return time.perf_counter() - began, rounds


def measured(world: ProcessGroup, target: em.Target, rows: int, tokens: int, pairs: int) -> float:
    """Run turns of both ways. Rank 0 prints the times. Return milliseconds per round without messages."""
    mx.random.seed(1)
    head = random_head(target)
    mx.eval(head.parameters())
    messages: list[float] = []

    def alike() -> float:
        world.any(False)  # start together
        seconds, rounds = decode(target, head, rows, tokens)
        return 1000 * seconds / rounds

    def led() -> float:
        channel = CountingChannel(world)
        if not world.is_rank_zero:
            follow(target, channel)
            return 0.0
        leading = LeadingTarget.of(target, channel)
        seconds, rounds = decode(leading, head, rows, tokens)
        messages.append(1000 * channel.seconds / rounds)
        leading.close()
        return 1000 * seconds / rounds

    ways: dict[str, Callable[[], float]] = {"alike": alike, "led": led}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for pair in range(-1, pairs):
        for name in list(ways)[:: 1 if pair % 2 else -1]:
            took = ways[name]()
            if pair >= 0:
                times[name].append(took)
    alike_ms, led_ms = statistics.median(times["alike"]), statistics.median(times["led"])
    if world.is_rank_zero:
        ratio = statistics.median(a / b for a, b in zip(times["alike"], times["led"], strict=True))
        sent = statistics.median(messages)
        print(
            f"{world.size} ranks, {rows} rows: a round takes {alike_ms:.1f} ms without messages, "
            f"{led_ms:.1f} with them; speed {ratio:.3f}; sending takes {sent:.2f} ms, "
            f"{sent / led_ms:.1%} of a round"
        )
    return alike_ms


def alone(target: em.Target, rows: int, tokens: int, turns: int = 5) -> float:
    """Return milliseconds per round for one process with the whole target."""
    mx.random.seed(1)
    head = random_head(target)
    times = [seconds / rounds for seconds, rounds in (decode(target, head, rows, tokens) for _ in range(turns))]
    return 1000 * statistics.median(times)


def summed(world: ProcessGroup, rows: int, hidden: int, times: int = 400) -> float:
    """Return milliseconds for one sum of a round's hidden states over all ranks."""
    states = mx.ones((rows, DEPTH + 1, hidden))
    mx.eval(mx.distributed.all_sum(states, group=world.group))
    began = time.perf_counter()
    for _ in range(times):
        states = mx.distributed.all_sum(states, group=world.group) / world.size
    mx.eval(states)
    return 1000 * (time.perf_counter() - began) / times


def reckoned(world: ProcessGroup, shape: Shape, rows: int, tokens: int, took: float) -> None:
    """On rank 0, print the estimated and the measured time of a round."""
    whole, least = 0.0, 0.0
    if world.is_rank_zero:
        whole = alone(em.Target(random_model(shape), None, "whole"), rows, tokens)
        least = alone(em.Target(random_model(replace(shape, layers=1)), None, "one layer"), rows, tokens)
    world.any(False)  # the others have waited
    of_a_sum = summed(world, rows, shape.hidden)
    if world.is_rank_zero:
        layers = (whole - least) * shape.layers / (shape.layers - 1)
        sums = 2 * shape.layers * of_a_sum
        told = whole - layers + layers / world.size + sums
        print(
            f"{world.size} ranks, {rows} rows: one process takes {whole:.1f} ms a round, {layers:.1f} of it in its "
            f"layers; a sum takes {of_a_sum:.3f}, {sums:.1f} a round; reckoned {told:.1f} ms, measured {took:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a target's folder (default: random weights)")
    parser.add_argument("--shape", choices=SHAPES, default="middling", help="of random weights (default: middling)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], metavar="N", help="(default: 1 4)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens per row and turn (default: 48)")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="turns per way (default: 10)")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="pin each rank to one core, under Linux; otherwise waiting threads of MLX busy other ranks' cores",
    )
    args = parser.parse_args()
    if args.pin:  # before MLX starts threads, which would not move
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["MLX_RANK"]) % len(cores)]})
    world = ProcessGroup.init()
    if world.group is None:
        parser.error("this needs several processes; start them with mlx.launch")
    model: nn.Module
    if args.target:
        model = em.load_target(args.target, mx.float32).model
    else:
        mx.random.seed(0)
        model = random_model(SHAPES[args.shape])
    shard_tensors(model, world.group)
    mx.eval(model.parameters())
    target = em.Target(model, None, args.target or args.shape)
    for rows in args.rows:
        took = measured(world, target, rows, args.tokens, args.pairs)
        if not args.target:
            reckoned(world, SHAPES[args.shape], rows, args.tokens, took)


if __name__ == "__main__":
    main()
