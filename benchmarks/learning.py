"""How a head rises that learns from requests: an engine answers prompts, and the learner works whenever it is idle.

    python benchmarks/learning.py --target checkpoints/target --head checkpoints/head --folder out/learned \\
        --requests 2000 --other checkpoints/prompts.jsonl

After every `--every` requests, τ is measured on prompts that are never served, and on the other prompts, without
answers that loop. Prompts describe functions of the standard library in words, or are those of `--traffic`; they are
repeated with new seeds until there are enough. `--first 1000` continues in a folder that has seen 1,000 requests.
`--head none` begins with n-grams.

`--adversarial` sends phases of random tokens, of loops and of one prompt between ordinary ones. `--load 4` times the
requests with and without learning in turn: all at once for tokens/s, then as many a second for the time to first token.
`--pairs 60` compares the CPU time of 32 requests at once, with and without learning, pair by pair.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import eagle_mlx as em  # isort: skip  (first: it brings the fast BLAS before MLX)

import mlx.core as mx
import numpy as np

from eagle_mlx.data_pipelines.sources.stdlib import functions_of, iter_files
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.serve.learning.learner import Learner, with_new_head
from eagle_mlx.serve.learning.options import LearnOptions
from eagle_mlx.serve.prompts import Question, read_questions
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.text import is_loop

DEPTH, ROWS = 4, 16
FRESH, OTHERS = 60, 40
"""Prompts for a measurement."""
Prompts = list[list[int]]


def described() -> list[Question]:
    """Return requests in words for the documented functions of the standard library, shuffled."""
    functions = (function for file in iter_files("train") for function in functions_of(file))
    texts = sorted({function.docstring for function in functions if function.docstring})
    random.Random(0).shuffle(texts)
    wishes = [f"Write a function that {text[0].lower()}{text[1:]}" for text in texts]
    return [Question([{"role": "user", "content": wish}]) for wish in wishes]


class Server:
    """An engine whose head learns, as in the server's thread."""

    def __init__(self, options: argparse.Namespace):
        self.target = em.load_target(options.target)
        self.options = options
        self.proposer: Proposer | None
        if options.head == "none":
            speculation = Speculation(mode="ngram")
            self.proposer = with_new_head(speculation.proposer(self.target), self.target, speculation)
        else:
            speculation, head = Speculation(head=options.head), em.load_head(options.head, self.target)
            quantize_for(head, self.target)
            self.proposer = em.HeadProposer(head)
        self.learner = Learner(LearnOptions(folder=options.folder), self.target, self.proposer, speculation)
        self.engine = self.new_engine(learns=True)

    def new_engine(self, learns: bool) -> em.Engine:
        collector = self.learner.collector if learns else None
        policy = em.FixedPolicy(DEPTH)
        return em.Engine(self.target, self.proposer, policy=policy, max_batch=ROWS, collector=collector)

    def encoded(self, questions: Sequence[Question]) -> Prompts:
        return [question.encode(self.target, max_tokens=self.options.tokens) for question in questions]

    def params(self, seed: int) -> em.SamplingParams:
        return em.SamplingParams(self.options.temperature, seed=seed, max_tokens=self.options.tokens)

    def serve(self, prompts: Prompts, first: int) -> None:
        """Answer prompts; then learn until there is nothing to do."""
        self.engine.generate(prompts, [self.params(seed) for seed in range(first, first + len(prompts))])
        while self.learner.pending:
            self.learner.work()

    def tau(self, prompts: Prompts) -> float:
        params = em.SamplingParams(max_tokens=self.options.tokens, learn=False, memory=False)
        outputs = [output for output in self.engine.generate(prompts, params) if not is_loop(output.tokens)]
        return sum(len(output.tokens) for output in outputs) / max(1, sum(output.rounds for output in outputs))

    def state(self, **more: Any) -> dict[str, Any]:
        row = {**more, "steps": self.learner.steps, "version": self.learner.versions.serving}
        print(row, flush=True)
        return row


def rise(server: Server, fresh: Prompts, served: Iterator[list[int]], other: Prompts) -> Iterator[dict[str, Any]]:
    first, every = server.options.first, server.options.every
    for count in range(first, first + server.options.requests + 1, every):
        began = perf_counter()
        if count > first:
            server.serve(list(islice(served, every)), count)
        seconds = round(perf_counter() - began)
        others = {"other": server.tau(other)} if other else {}
        yield server.state(requests=count, tau=server.tau(fresh), **others, seconds=seconds)


def adversarial(server: Server, fresh: Prompts, served: Iterator[list[int]]) -> Iterator[dict[str, Any]]:
    rng, count = np.random.default_rng(0), server.options.every
    one, vocab = next(served), server.target.vocab_size
    phases: dict[str, Prompts] = {
        "ordinary": list(islice(served, count)),
        "random tokens": rng.integers(0, vocab, (count, 40)).tolist(),
        "loops": [[int(token)] * 40 for token in rng.integers(0, vocab, count)],
        "one prompt": [one] * count,
        "ordinary again": list(islice(served, count)),
    }
    yield server.state(phase="before", tau=server.tau(fresh))
    for number, (phase, prompts) in enumerate(phases.items()):
        server.serve(prompts, number * count)
        yield server.state(phase=phase, tau=server.tau(fresh))


def fill(server: Server, served: Iterator[list[int]]) -> None:
    """Serve requests until the learner has work."""
    while not server.learner.pending:
        server.engine.generate(list(islice(served, 64)), [server.params(seed) for seed in range(64)])


def pairs(server: Server, served: Iterator[list[int]], count: int) -> Iterator[dict[str, Any]]:
    """Compare the CPU time of the same 32 requests at once with and without learning, with a share of 0.

    Both engines answer them step by step in turn, so that a machine whose speed changes slows both. The order changes
    from step to step. The first pair warms up. A row has the median of the speeds with learning over those without,
    and its interval of 95 % (bootstrap).
    """
    engines, ratios = {learns: server.new_engine(learns) for learns in (True, False)}, list[float]()
    for number in range(count + 1):
        prompts, seconds = list(islice(served, 2 * ROWS)), {True: 0.0, False: 0.0}
        params = [server.params(1000 * number + seed) for seed in range(len(prompts))]
        requests = {
            learns: [engine.prepare(*request) for request in zip(prompts, params, strict=True)]
            for learns, engine in engines.items()
        }
        for learns, engine in engines.items():
            for request in requests[learns]:
                engine.submit(request)
        for turn in cycle((True, False, False, True)):
            if all(engine.idle for engine in engines.values()):
                break
            began = process_time()
            engines[turn].step()
            mx.synchronize()
            seconds[turn] += process_time() - began
        began = process_time()
        server.learner.collector.take()
        seconds[True] += process_time() - began
        assert [r.tokens for r in requests[True]] == [r.tokens for r in requests[False]]
        ratios += [seconds[False] / seconds[True]] if number else []
        if ratios and (len(ratios) % 10 == 0 or len(ratios) == count):
            medians = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
            low, high = np.quantile(medians, (0.025, 0.975)).tolist()
            yield server.state(pairs=len(ratios), speed=float(np.median(ratios)), low=low, high=high)


def load(server: Server, served: Iterator[list[int]]) -> Iterator[dict[str, Any]]:
    """Time the same requests with and without learning; the learner has work all the time."""
    prompts = list(islice(served, server.options.requests))
    fill(server, served)
    for learns in (True, False) * 3:
        engine = server.new_engine(learns)
        _, speed = timed(server, engine, prompts, [0.0] * len(prompts), learns)
        arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / server.options.load, len(prompts))).tolist()
        waits, _ = timed(server, engine, prompts, arrivals, learns)
        yield server.state(learns=learns, tokens_per_second=speed, first_token_p95=float(np.quantile(waits, 0.95)))


def timed(
    server: Server, engine: em.Engine, prompts: Prompts, arrivals: Sequence[float], learns: bool
) -> tuple[list[float], float]:
    """Return the seconds to each request's first token, and the tokens per second."""
    requests = [engine.prepare(prompt, server.params(seed)) for seed, prompt in enumerate(prompts)]
    learner, began, number, waits = server.learner, perf_counter(), 0, dict[int, float]()
    while len(waits) < len(requests) or not engine.idle:
        while number < len(requests) and arrivals[number] <= perf_counter() - began:
            engine.submit(requests[number])
            number += 1
        if engine.idle:
            learner.work() if learns and learner.pending else sleep(0.001)
            continue
        start = perf_counter()
        engine.step()
        ended = perf_counter()
        for at in range(number):
            if requests[at].tokens:
                waits.setdefault(at, ended - began - arrivals[at])
        if learns and learner.may_work(ended - start):
            learner.work()
            learner.spent(perf_counter() - ended)
    tokens = sum(len(request.tokens) for request in requests)
    return list(waits.values()), tokens / (perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--target", "--head"):
        parser.add_argument(name, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--traffic", "--other", "--json"):
        parser.add_argument(name, type=Path)
    for name, default in (("--first", 0), ("--requests", 2000), ("--every", 200), ("--tokens", 96)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--adversarial", action="store_true")
    parser.add_argument("--load", type=float)
    parser.add_argument("--pairs", type=int)
    options = parser.parse_args(argv)
    server = Server(options)
    prompts = server.encoded(read_questions(options.traffic, 10**6) if options.traffic else described())
    held_out = min(FRESH, len(prompts) // 2)
    fresh, served = prompts[:held_out], islice(cycle(prompts[held_out:]), options.first, None)
    if options.pairs:
        rows = list(pairs(server, served, options.pairs))
    elif options.load:
        rows = list(load(server, served))
    elif options.adversarial:
        rows = list(adversarial(server, fresh, served))
    else:
        other = server.encoded(read_questions(options.other, OTHERS)) if options.other else []
        rows = list(rise(server, fresh, served, other))
    server.learner.close()
    if options.json is not None:
        events = list(map(asdict, server.learner.versions.events))
        options.json.write_text(json.dumps({"rows": rows, "events": events}, indent=1))


if __name__ == "__main__":
    main()
