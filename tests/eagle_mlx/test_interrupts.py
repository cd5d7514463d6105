"""Interrupts at every line of the engine: each request ends with an error or continues with the right text."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.engine.groups import RoundReads
from eagle_mlx.policy import Policy
from eagle_mlx.request_state import RequestState
from tests import disk_tier
from tests.eagle_mlx.heads import PROPOSERS
from tests.eagle_mlx.test_failing_steps import Failing
from tests.fakes import tiny_target
from tests.full import FULL, in_full

ENGINE = str(Path(em.__file__).parent / "engine")
ERRORS: list[type[BaseException]] = [KeyboardInterrupt, MemoryError]
Line = tuple[str, int]
SAMPLE, PARTS = 160, 8
"""Without EAGLE_FULL, one of 160 lines of each scenario is tried. With it all are, in 8 tests."""
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 90, n)] for n in (5, 70, 17, 40, 33)]
GREEDY = em.SamplingParams(max_tokens=8, ignore_eos=True)
PENALIZED = replace(GREEDY, temperature=0.9, seed=3, repetition_penalty=1.3)
ALWAYS = RoundReads(fixed=0, position=1 << 20)
"""Free weights, so that any difference in length separates rows into two groups."""


class Tracer:
    """Counts the lines of the engine that run, and raises once before one of them."""

    def __init__(self, line: Line | None = None, count: int = 1, error: type[BaseException] = KeyboardInterrupt):
        """`count`: raise when `line` begins for the `count`-th time."""
        self.line, self.count, self.error = line, count, error
        self.counts: Counter[Line] = Counter()
        self.raised = False

    def call(self, do: Callable[..., object], *args: object) -> bool:
        """Call a method of the engine. Return whether the error ended it."""
        if self.raised:
            do(*args)
            return False
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            do(*args)
        except self.error:
            assert self.raised
        finally:
            sys.settrace(before)
        return self.raised

    def _called(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(ENGINE) or (self.line is not None and name != self.line[0]):
            return None
        blocks = set[int]()

        def local(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            line = frame.f_lineno
            if event != "line":
                return local
            if linecache.getline(name, line).lstrip().startswith("with "):
                blocks.symmetric_difference_update({line})
                if line not in blocks:  # the block ends; Python checks for signals in calls, so none can arise here
                    return local
            self.counts[name, line] += 1
            if (name, line) == self.line and self.counts[name, line] == self.count and not self.raised:
                self.raised = True
                raise self.error("injected")
            return local

        return local


@dataclass(frozen=True)
class Scenario:
    make: Callable[[Path], em.Engine]
    texts: Sequence[tuple[list[int], list[int]]]
    """Prompts, and the target's own continuations."""
    acts: Sequence[tuple[int, str, int]]
    """Calls of the engine's methods: the step before which, the method, the index of the request."""
    clients: str = "aaaaaaaa"
    params: em.SamplingParams = GREEDY
    boundaries: Sequence[int] = ()

    def run(self, tracer: Tracer) -> None:
        with TemporaryDirectory() as folder:
            engine = self.make(Path(folder))
            self._run(engine, tracer)
            again = engine.generate(
                [prompt for prompt, _ in self.texts], [self._params(text) for _, text in self.texts]
            )
            assert [(output.tokens, output.error) for output in again] == [(text, None) for _, text in self.texts]
            assert engine.idle
            if engine.prefixes is not None and engine.prefixes.disk is not None:
                disk_tier.written(engine)

    def _params(self, text: Sequence[int]) -> em.SamplingParams:
        return replace(self.params, max_tokens=len(text))

    def _run(self, engine: em.Engine, tracer: Tracer) -> None:
        rows = [
            engine.prepare(prompt, self._params(text), self.boundaries, client)
            for (prompt, text), client in zip(self.texts, self.clients, strict=False)
        ]
        submitted = list[RequestState]()
        for step in range(400):
            for at, name, index in self.acts:
                if at == step:
                    failed = tracer.call(getattr(engine, name), rows[index])
                    if name == "submit" and (not failed or rows[index] in engine.admission.waiting):
                        submitted.append(rows[index])
            if engine.idle and step > max(at for at, _, _ in self.acts):
                break
            tracer.call(engine.step)
            owned = engine.snapshot().requests
            assert len(set(owned)) == len(owned), "a request has two places"
            assert {row for row in submitted if row.finish_reason is None} <= set(owned), "a request is lost"
        assert engine.idle
        assert engine.kv_budget.set_aside(engine.kv_budget.admitted) == 0
        for row, (_, text) in zip(rows, self.texts, strict=True):
            if row.finish_reason == "length":
                assert row.tokens == text
            else:
                assert row.tokens == text[: len(row.tokens)]
                assert row.finish_reason in ("error", "cancelled", None if row not in submitted else "error")


TARGET = tiny_target()


@cache
def texts(params: em.SamplingParams = GREEDY) -> list[tuple[list[int], list[int]]]:
    alone = em.Engine(TARGET, max_batch=1)
    return [(prompt, alone.generate([prompt], params)[0].tokens) for prompt in PROMPTS]


ARRIVALS = [*((0, "submit", index) for index in range(4)), (9, "submit", 4)]


def in_groups(drafts: str, policy: Policy, **settings: Any) -> Callable[[Path], em.Engine]:
    def make(folder: Path) -> em.Engine:
        engine = em.Engine(TARGET, PROPOSERS[drafts](TARGET), policy=policy, max_batch=3, **settings)
        engine.groups.reads = ALWAYS
        return engine

    return make


def with_files(kind: str, drafts: str) -> Scenario:
    """Two prompts that begin like a text that another engine has written to disk."""
    fill = disk_tier.with_text
    prompts = [disk_tier.TEXT, [*disk_tier.TEXT[: disk_tier.SYSTEM], 5, 6, 7]]

    def make(folder: Path) -> em.Engine:
        fill(folder, kind, drafts)
        return disk_tier.engine(folder, kind, drafts)

    continuations = [(prompt, disk_tier.cold(tuple(prompt), kind, drafts)) for prompt in prompts]
    return Scenario(make, continuations, [(0, "submit", 0), (2, "submit", 1)], boundaries=(60,))


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "joins, leaves, pauses": lambda: Scenario(
        in_groups("none", em.FixedPolicy(0), prefill_chunk=16, prefix_cache_bytes=100_000),
        [*texts(), texts()[1]],
        [
            *ARRIVALS,
            (7, "cancel", 2),
            (8, "pause", 0),
            (8, "pause", 1),
            (12, "cancel", 3),
            (13, "submit", 5),
            (26, "cancel", 5),
        ],
        "aaaabb",
    ),
    "a head": lambda: Scenario(
        in_groups("head", em.FixedPolicy(2, 5), prefill_chunk=32, prefix_cache_bytes=1 << 20),
        texts(),
        [*ARRIVALS, (6, "pause", 0), (6, "pause", 1)],
        "aaabb",
    ),
    "a draft model": lambda: Scenario(
        in_groups("draft model", em.FixedPolicy(2), prefix_cache_bytes=1 << 20), texts()[:3], ARRIVALS[:3]
    ),
    "n-grams in one group": lambda: Scenario(
        lambda folder: em.Engine(
            TARGET, em.NgramProposer(), policy=em.FixedPolicy(2), max_batch=2, groups=1, exact=True
        ),
        texts(PENALIZED)[:3],
        [*ARRIVALS[:3], (3, "pause", 0)],
        "aab",
        PENALIZED,
    ),
    "drafting that raises": lambda: Scenario(
        lambda folder: em.Engine(
            TARGET, Failing("draft", 3), policy=em.FixedPolicy(2), max_batch=2, prefix_cache_bytes=1 << 20
        ),
        texts()[:3],
        ARRIVALS[:3],
    ),
    "files": lambda: with_files("full", "none"),
    "files of states": lambda: with_files("qwen3_next", "head"),
}


@pytest.mark.parametrize("part", range(in_full(PARTS, 1)))
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_at_any_line_loses_no_request_and_changes_no_text(
    name: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error at each line: when it first runs, or later."""
    monkeypatch.setattr("eagle_mlx.engine.disk.snapshot_file.BLOCK", 32)
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.STEP_BYTES", 1)
    scenario, counting = SCENARIOS[name](), Tracer()
    scenario.run(counting)
    cases, failures = [], []
    for number, (line, count) in enumerate(sorted(counting.counts.items())):
        later = 1 + int(np.random.default_rng(number).integers(count))
        cases.append((line, (1, later)[number % 2], ERRORS[number // 2 % 2]))
    for line, at, error in cases[part::PARTS] if FULL else cases[len(name) :: SAMPLE]:
        tracer = Tracer(line, at, error)
        try:
            scenario.run(tracer)
        except BaseException as e:
            failures.append(f"{Path(line[0]).name}:{line[1]} ({at}, {error.__name__}): {type(e).__name__}: {e!s:.150}")
        assert tracer.raised or failures
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)} lines", *failures])
