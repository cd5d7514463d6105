"""Every token is the target's own with any proposer and any history of requests, for every architecture.

Histories are random; whole forwards of mlx-lm's models judge them. `EAGLE_FUZZ_ROUNDS=200 pytest -s
tests/eagle_mlx/test_fresh_forwards.py` plays 200 histories per architecture and prints what was judged;
`EAGLE_FUZZ_SEED` gives the first seed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
import eagle_mlx.engine.batch
from eagle_mlx.cache import RaggedCache, full
from eagle_mlx.cache.kinds import ONE_ROW
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.decoding.verify import Verdict
from eagle_mlx.engine.prefix import LEAST
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request_state import RequestState
from tests.architectures import CONFIGS, VOCAB, sicken, tiny_model
from tests.eagle_mlx.heads import WITH_HEADS
from tests.fakes import randomize
from tests.fresh_forwards import Judge, judge, untouched
from tests.full import in_full, in_turn
from tests.grammars import Steps
from tests.hostile import HostileProposer, Manners, ProposerRaised, RandomPolicy

ROUNDS = int(os.environ.get("EAGLE_FUZZ_ROUNDS", "1"))
FIRST = int(os.environ.get("EAGLE_FUZZ_SEED", "0"))
REQUESTS = in_full(8, 4)
"""Requests in a history."""
ROOT = in_full(56, 32)
"""Tokens of the target's own text after a prompt of 8."""
WINDOW_RING = 28
"""A little more than the 24 entries that the tiny models' window of 8 keeps."""
WEIGHTS_LAST = 10
"""Histories of an architecture with the same weights."""
MOST_STEPS = 600
"""Many times what eight requests of up to 20 tokens take in chunks of one token."""
SICK_PROMPTS = 0.2
"""Share of prompts with a token that the target reads as NaN, if a history has one.

As many others share the last such prompt's prefix and continue without the token.
"""
EXCUSED = 0.005
"""Allowed share of tokens that rounding decides: one in two hundred."""

NO_HIDDEN_STATES = ("gemma3n", "iquestloopcoder")
"""Models whose layers have no hidden states for a proposer."""


@dataclass
class Figures:
    histories: int = 0
    requests: int = 0
    ended: int = 0
    """Ended by a stop token or their length."""
    cancelled: int = 0
    failed: int = 0
    """Failed because their proposer raised, or because they or their drafts read NaN."""
    pauses: int = 0
    """How often a row was paused."""
    taken_over: int = 0
    """Requests that began with a past from the prefix cache."""
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    judged: int = 0
    excused: int = 0
    hidden: int = 0
    """Positions whose hidden states were compared."""
    faults: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        for figure in fields(self):
            setattr(self, figure.name, getattr(self, figure.name) + getattr(other, figure.name))

    def __str__(self) -> str:
        numbers = [f"{figure.name} {getattr(self, figure.name)}" for figure in fields(self) if figure.name != "faults"]
        return ", ".join([*numbers, f"faults {len(self.faults)}"])


@lru_cache(maxsize=1)
def target(name: str, weights: int, sick: int | None = None) -> em.Target:
    """Return a target. `sick`: a token that it reads as NaN."""
    model = tiny_model(name)
    randomize(model, weights, 0.2)
    if sick is not None:
        sicken(model, sick)
    return em.Target(model, name=name)


@lru_cache
def may_be_sick(name: str) -> bool:
    """Return whether only one token can read as NaN. False if the embedding also gives the logits."""
    model = tiny_model(name)
    sicken(model, 0)
    return not bool(mx.any(mx.isnan(model(mx.array([[1, 2]])))))


ROOTS = (
    em.SamplingParams(),
    em.SamplingParams(temperature=0.8, seed=1),
    em.SamplingParams(),
    em.SamplingParams(temperature=1.2, seed=2, top_k=20),
)
"""How the texts for prompts are drawn, so that a proposer can know how a request continues."""


@lru_cache(maxsize=1)
def roots(name: str, weights: int) -> list[list[int]]:
    """Return the target's texts after prompts of 8 tokens."""
    prompts = np.random.default_rng([crc32(name.encode()), weights]).integers(0, VOCAB, (len(ROOTS), 8)).tolist()
    sampling = [SamplingBatch.of([params], [params.seed or 0]) for params in ROOTS]
    if name in ONE_ROW:
        return [judge(name, weights).texts([p], s, ROOT)[0] for p, s in zip(prompts, sampling, strict=True)]
    return judge(name, weights).texts(prompts, SamplingBatch.of(ROOTS, [p.seed or 0 for p in ROOTS]), ROOT)


def forbids(text: list[int], logits: mx.array) -> mx.array:
    """A logits processor that masks half of the vocabulary, depending on the text's last tokens."""
    allowed = (np.arange(logits.shape[-1]) + sum(text[-2:])) % 2 == 0
    return mx.where(mx.array(allowed), logits, -mx.inf)


class HalfMasks(Steps):
    """Allows half of the vocabulary, depending on its last token."""

    vocab, end = VOCAB, None

    def allowed(self, token: int) -> bool:
        return not self.taken or (token + self.taken[-1]) % 2 == 0


class History:
    """Requests that come and go at random, all from one seed."""

    def __init__(self, name: str, seed: int):
        self.name, self.seed, self.weights = name, seed, seed // WEIGHTS_LAST
        self.rng = np.random.default_rng([crc32(name.encode()), seed])
        self.sick = self._sick()
        self.target, self.judge = target(name, self.weights, self.sick), judge(name, self.weights)
        self.windows = self.judge.has_windows
        self.texts = [list(text) for text in roots(name, self.weights)]
        self.interrupted: list[tuple[list[int], em.SamplingParams]] = []
        """Texts before the token that reads as NaN, in prompts with it; snapshots may end there."""
        self.rows: list[RequestState] = []
        self.leaving: list[tuple[RequestState, int, int]] = []
        """Requests to cancel, after some tokens or after some steps."""
        self.figures = Figures(histories=1)
        self.step = 0
        self.reach = int(self.rng.choice([WINDOW_RING, 60, 90], p=[0.7, 0.2, 0.1] if self.windows else [0.2, 0.4, 0.4]))
        """Maximum tokens of a shared beginning."""
        self.manners = self._manners()
        self.leaves_inside = self._chance(0.3)
        self.clients = int(self.rng.choice([1, 3]))
        """Clients, which take turns: a client that holds more rows than another gives one back."""
        self.pauses = float(self.rng.choice([0.0, 0.4]))
        """Share of steps before which a row is paused."""
        self.proposer = self._proposer()
        self.engine = self._engine()

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _sick(self) -> int | None:
        """In half of the histories, return a token that the target reads as NaN, but the judge does not."""
        token = int(self.rng.integers(VOCAB))
        return token if self._chance(0.5) and may_be_sick(self.name) else None

    def _proposer(self) -> Proposer | None:
        """Return a hostile proposer, or in one of six histories none, or one of the library's."""
        kind = (self.seed + crc32(self.name.encode())) % 12
        if kind == 11:
            return None
        if kind < 10:
            return HostileProposer(self.rng, self.texts, self.manners)
        if self.manners.aux_layers:
            return list(WITH_HEADS.values())[self.seed % len(WITH_HEADS)](self.target)
        if RaggedCache.of(self.target.model, 1).recurrent:
            return em.NgramProposer()
        return em.DraftModelProposer(self.target)

    def _manners(self) -> Manners:
        layers = self.target.num_layers
        shows = self._chance(0.5) and self.name not in NO_HIDDEN_STATES
        lengths, ids, trees, raises = (self._chance(share) for share in (0.3, 0.3, 0.3, 0.2))
        return Manners(
            aux_layers=(0, layers - 1) if shows else (),
            lengths=lengths,
            ids=ids,
            trees=trees,
            raises=0.05 if raises else 0.0,
        )

    def _engine(self) -> em.Engine:
        trees = self._chance(0.7)
        nbytes = int(self.rng.choice([0, 200_000, 1 << 30], p=[0.2, 0.2, 0.6]))
        rows = 1 if self.name in ONE_ROW else int(self.rng.choice([1, 2, 3, 6], p=[0.1, 0.1, 0.2, 0.6]))
        chunk = int(self.rng.choice([1, 3, 7, 16, 33, 512], p=[0.05, 0.15, *[0.2] * 4]))
        policy = RandomPolicy(self.rng, trees)
        engine = em.Engine(
            self.target, self.proposer, policy=policy, max_batch=rows, prefill_chunk=chunk, prefix_cache_bytes=nbytes
        )
        if self.leaves_inside:
            engine.observer = lambda report: self._cancel()
        return engine

    def play(self) -> Figures:
        """Let all requests start and end, and judge their texts."""
        try:
            self._decode()
        except Exception:
            self._fault(f"raised\n{traceback.format_exc()}")
        for number, row in enumerate(self.rows):
            self._judge(number, row)
        self._judge_sights()
        return self.figures

    def _decode(self) -> None:
        for self.step in range(MOST_STEPS):
            if len(self.rows) < REQUESTS and (self.engine.idle or self._chance(0.12)):
                for _ in range(int(self.rng.integers(1, 4))):
                    self._submit()
            try:
                self._cancel()
                if self.rows and self.step < MOST_STEPS // 2 and self._chance(self.pauses):  # then all can end
                    self.engine.pause(self.rows[int(self.rng.integers(len(self.rows)))])
                self.engine.step()
            except ProposerRaised:
                if not self.manners.raises:
                    raise
            if len(self.rows) >= REQUESTS and all(row.finish_reason for row in self.rows):
                break
            self.texts[len(ROOTS) :] = [[*row.prompt, *row.tokens] for row in self.rows if row.finish_reason]
        left = [number for number, row in enumerate(self.rows) if not row.finish_reason]
        if left:
            self._fault(f"requests {left} never ended; the engine is {'idle' if self.engine.idle else 'busy'}")
        elif not self.engine.idle:
            self.engine.step()  # rows cancelled in the last step may leave
            if not self.engine.idle:
                self._fault(f"all requests have ended; {self.engine.active} active, {self.engine.waiting} waiting")

    def _submit(self) -> None:
        prompt, own = self._prompt()
        prompt = prompt[: self.target.context_length - 1]
        # A snapshot before the token is taken with the keys after it, and later prompts begin with it.
        boundaries = [prompt.index(self.sick)] if self.sick is not None and self.sick in prompt else []
        params, client = self._params(own), f"client {int(self.rng.integers(self.clients))}"
        row = self.engine.prepare(prompt, params, boundaries, client)
        self.rows.append(row)
        self.figures.requests += 1
        self.engine.submit(row)
        if self._chance(0.25):
            tokens, steps = int(self.rng.integers(1, row.limit + 1)), int(self.rng.integers(0, 6))
            self.leaving.append((row, tokens, MOST_STEPS if self._chance(0.7) else self.step + steps))

    def _prompt(self) -> tuple[list[int], em.SamplingParams]:
        """Return the start of a known or earlier text, or random tokens, sometimes with others appended.

        Also return how the text that it begins is drawn.
        """
        count = 1 if self._chance(0.3) else int(self.rng.integers(1, 40))
        fresh = [int(token) for token in self.rng.integers(0, VOCAB, count)]
        kind = self.rng.choice(["root", "earlier", "fresh"], p=[0.5, 0.4, 0.1])
        root, row = int(self.rng.integers(len(ROOTS))), int(self.rng.integers(len(self.rows))) if self.rows else None
        if kind == "fresh":
            return fresh, ROOTS[root]
        text, own = self.texts[root], ROOTS[root]
        if kind == "earlier" and row is not None:
            text, own = [*self.rows[row].prompt, *self.rows[row].tokens], self.rows[row].params
        start = text[: int(self.rng.integers(1 if self._chance(0.2) else LEAST, self.reach))]
        if self.interrupted and self._chance(SICK_PROMPTS):  # continues where a snapshot may hold NaN
            start, own = self.interrupted[-1]
            return [*start, *fresh[:12]], own
        if self.sick is not None and self._chance(SICK_PROMPTS):
            start = text[: max(LEAST + 2, len(start))]  # shorter ones are not kept
            self.interrupted.append((start, own))
            return [*start, self.sick, *fresh[:12]], own
        return ([*start, *fresh[:12]] if self._chance(0.25) else start), own

    def _params(self, own: em.SamplingParams) -> em.SamplingParams:
        any_seed = int(self.rng.integers(1000))
        stops = [int(token) for token in self.rng.integers(0, VOCAB, 2)] if self._chance(0.3) else []
        params = [
            own,
            em.SamplingParams(temperature=0.7, seed=any_seed),
            em.SamplingParams(temperature=1.0, seed=any_seed, min_p=0.05),
            em.SamplingParams(temperature=1.0, seed=any_seed, acceptance="rejection", top_k=4),
            em.SamplingParams(temperature=1.0, seed=any_seed, acceptance="threshold", threshold=0.02),
        ][int(self.rng.choice(5, p=[0.82, 0.04, 0.03, 0.05, 0.06]))]
        most = int(self.rng.choice([1, 2, 6, 12, 20], p=[0.05, 0.05, 0.2, 0.3, 0.4]))
        processed, guided = self._chance(0.08), self._chance(0.15)  # not both: together they may allow nothing
        return em.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            acceptance=params.acceptance,
            threshold=params.threshold,
            stop_token_ids=tuple(stops),
            max_tokens=most,
            logits_processors=(forbids,) if processed else (),
            grammar=HalfMasks if guided and not processed else None,
            logprobs=self._chance(0.1),
            num_speculative_tokens=int(self.rng.integers(0, 4)) if self._chance(0.1) else None,
        )

    def _cancel(self) -> None:
        """Cancel the requests that are due."""
        for row, tokens, step in self.leaving:
            if len(row.tokens) >= tokens or self.step >= step:
                self.engine.cancel(row)

    def _judge(self, number: int, row: RequestState) -> None:
        figures, tokens, params = self.figures, row.tokens, row.params
        label = f"request {number} ({params.rule}, {len(row.prompt)} tokens, {row.counts.cached_tokens} of them cached)"
        figures.taken_over += row.counts.cached_tokens > 0
        figures.pauses += row.counts.pauses
        figures.rounds += row.counts.rounds
        figures.drafted += sum(row.counts.drafted_by_position)
        figures.accepted += sum(row.counts.accepted_by_position)
        figures.judged += len(tokens)
        if row.finish_reason == "error":
            figures.failed += 1
            drafts_nan = self.sick is not None and self.proposer is not None
            may_read_nan = drafts_nan or self.sick in [*row.prompt, *tokens]
            if not (may_read_nan and "NaN" in (row.error or "")) and not self.manners.raises:
                self._fault(f"{label} failed: {row.error}")
        elif row.finish_reason == "cancelled":
            figures.cancelled += 1
        elif row.finish_reason is not None:
            figures.ended += 1
            stopped = bool(tokens) and tokens[-1] in row.request.stop_ids
            if row.finish_reason != ("stop" if stopped else "length") or not (stopped or len(tokens) == row.limit):
                self._fault(f"{label} ended ({row.finish_reason}) after {len(tokens)} of {row.limit} tokens")
        if self.sick in [*row.prompt, *tokens[:-1]] and tokens:
            self._fault(f"{label} went on after a token that reads as NaN")
        if any(token in row.request.stop_ids for token in tokens[:-1]):
            self._fault(f"{label} went on after a stop token")
        if not all(0 <= token < VOCAB for token in tokens):
            self._fault(f"{label} said {tokens}, outside the vocabulary")
        elif tokens:
            faults, excused = self.judge.faults(row.prompt, tokens, params)
            figures.excused += excused
            if params.logprobs:
                reported = [token.logprob for token in row.logprobs]
                wanted = self.judge.logprobs(row.prompt, tokens)
                if len(reported) != len(wanted) or not np.allclose(reported, wanted, atol=1e-2):
                    self._fault(f"{label} reports log probabilities of {reported}")
            if faults:
                more = f" and {len(faults) - 1} more" if faults[1:] else ""
                self._fault(f"{label}: {faults[0]}{more}, of {len(tokens)}")

    def _judge_sights(self) -> None:
        """Compare the hidden states that the proposer saw with those of a fresh forward."""
        if isinstance(self.proposer, HostileProposer) and self.proposer.misplaced:
            self._fault(f"{self.proposer.misplaced} drafts were asked for at another place than a text's end")
        ended_by_nan = [row.text for row in self.rows if "NaN" in (row.error or "")]
        for sight in self.proposer.sights if isinstance(self.proposer, HostileProposer) else ():
            if not sight.hidden or self.sick in sight.text:
                continue
            if any(sight.text[: len(text)] == text for text in ended_by_nan):  # their last round may be anything
                continue
            shown = np.stack(sight.hidden)
            text = sight.text[: len(shown)]
            other = judge_of_layers(self.name, self.weights)
            wanted = other.hidden(text, self.manners.aux_layers)
            self.figures.hidden += len(shown)
            off = np.abs(shown - wanted).max(axis=1) / np.abs(wanted).max()
            if other.has_experts and (off >= 1e-3).sum() == 1:  # a fault would change what later positions read
                self.figures.excused += 1
                continue
            if len(text) < len(shown) or not (off < 1e-3).all():
                self._fault(f"hidden states off by {off.max():.2g} from position {int((off >= 1e-3).argmax())}")

    def _fault(self, what: str) -> None:
        self.figures.faults.append(f"{self.name} seed {self.seed}: {what}")


@lru_cache(maxsize=1)
def judge_of_layers(name: str, weights: int) -> Judge:
    """Return another judge than for texts, because its layers are watched."""
    return Judge(name, weights)


@pytest.fixture(scope="module")
def totals() -> Iterator[Figures]:
    figures = Figures()
    yield figures
    if ROUNDS > 1:
        print(f"\nall: {figures}")


@pytest.mark.parametrize("name", sorted(CONFIGS) if ROUNDS > 1 else in_turn(sorted(CONFIGS), 1, of=8))
def test_every_token_is_the_targets_own(name: str, totals: Figures) -> None:
    figures = Figures()
    for seed in range(FIRST, FIRST + ROUNDS):
        figures.add(History(name, seed).play())
        mx.clear_cache()
    totals.add(figures)
    if ROUNDS > 1:
        print("\n".join([f"\n{name}: {figures}", *figures.faults]), flush=True)
    assert figures.faults == []
    assert figures.judged > 5 * ROUNDS or figures.failed  # cancels, and proposers that raise, shorten histories
    assert figures.excused <= EXCUSED * figures.judged + 1
    assert untouched(judge(name, FIRST // WEIGHTS_LAST).model)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["gemma3_text", "granitemoehybrid", "llama", "qwen3"])
def test_every_token_is_the_targets_own_as_on_a_gpu(name: str, totals: Figures) -> None:
    test_every_token_is_the_targets_own(name, totals)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "llama", "qwen3_next"])
def test_every_token_is_the_targets_own_in_buffers_that_change_all_the_time(
    name: str, totals: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "STEP", 2)
    test_every_token_is_the_targets_own(name, totals)


def test_a_wrong_token_is_detected() -> None:
    rng, [text, drawn, *_] = np.random.default_rng(0), roots("llama", 0)
    greedy, seeded, possible = ROOTS[0], ROOTS[1], em.SamplingParams(temperature=1.0, seed=0, acceptance="rejection")
    judge_of = judge("llama", 0)
    assert judge_of.faults(text[:8], text[8:], greedy) == ([], 0)
    assert judge_of.faults(drawn[:8], drawn[8:], seeded) == ([], 0)
    assert len(judge_of.faults(drawn[:8], drawn[8:], greedy)[0]) > 10
    for own, params in ((text, greedy), (drawn, seeded), (text, replace(possible, top_k=1))):
        for place in rng.integers(8, len(own), 10):
            other = [*own[:place], (own[place] + 1 + int(rng.integers(VOCAB - 1))) % VOCAB]
            [fault], excused = judge_of.faults(other[:8], other[8:], params)
            assert (fault.place, fault.token, fault.wanted, excused) == (place - 8, other[-1], own[place], 0)
    assert judge_of.faults(drawn[:8], drawn[8:], replace(possible, top_k=VOCAB - 1)) == ([], 0)
    assert judge_of.faults(drawn[:8], drawn[8:], replace(possible, top_k=2))[0]


def test_an_unlikely_token_of_a_threshold_row_is_detected() -> None:
    [_, drawn, *_], judge_of = roots("llama", 0), judge("llama", 0)
    params = replace(ROOTS[1], acceptance="threshold", threshold=1e-6)
    other = [*drawn[:20], *([(drawn[20] + 1) % VOCAB] * 4)]
    assert judge_of.faults(other[:8], other[8:], params) == ([], 0)
    assert judge_of.faults(other[:8], other[8:], replace(params, threshold=0.9))[0]


def keep_all(logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: SamplingBatch, at: mx.array) -> Any:
    return Verdict(lengths, mx.concatenate([drafts, mx.argmax(logits[:, -1:], axis=-1)], axis=1).astype(mx.int32))


def test_an_engine_that_accepts_every_draft_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_mlx.engine.batch, "verify", keep_all)
    assert sum(len(History("llama", seed).play().faults) for seed in range(3)) > 3
