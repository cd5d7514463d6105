"""The learner: a copy of the serving head learns from collected texts; their mean takes over if it drafts better.

Its work is cut into pieces of about a training step, which the engine's thread does between steps (`Learner.work`).
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from eagle_mlx import HeadProposer, HybridProposer, Memory, NgramProposer, SamplingParams
from eagle_mlx.catalog.head_search import load_found
from eagle_mlx.engine.collector import Collector
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.hidden_states import Example, from_16_bits
from eagle_mlx.judge import Judge, Recording, draft_along
from eagle_mlx.paired import LEAST_GAIN, gain_of
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.shards import ShardMeta
from eagle_mlx.target import Target, digest_of, fingerprint
from eagle_mlx.text import is_loop

from ..speculation import Speculation, bytes_of
from .drift import DriftDetector
from .options import LearnOptions
from .texts import Text, Texts
from .versions import TEXTS, Event, Outcome, Versions, claim

if TYPE_CHECKING:
    from eagle_mlx.train import OnlineTrainer

log = logging.getLogger("eagle_mlx.serve")
_BUFFER_BYTES = 256 << 20
"""Texts that wait in memory while requests keep the device busy."""
CYCLE_TOKENS = 4096
"""New tokens after which the head learns again: with 8,500, a real head rose from 2.29 to 2.86 tokens per forward."""
PASSES = 6
"""Training tokens for each new one; half of them replay older texts, against forgetting."""
_MOST_STEPS = 400
"""Steps of a cycle, so that a candidate is judged within minutes."""
LEAST_JUDGED, MOST_JUDGED = 12, 160
"""Held-out conversations of a verdict: the paired judge tells a gain of 10 % by a dozen or two, and of 3 % by 160
(benchmarks/judge.py)."""
_JUDGED_TOKENS = 64
"""Tokens of an answer along which heads draft, because a request may wait for that."""
_MOST_LOST = 0.02
"""The most that versions may lose in all over the older half of the conversations, for what is unusual now."""
_DEPTH = 4  # draft tokens of the judge, as in `eagle-heads compare`
_RAREST = 64  # cycles need up to so many times the tokens while nothing is gained
_MOST_FAILURES = 3
"""Failures in a row after which learning stops: a full disk may have space again, but a fault returns every time."""
_CREDIT_SECONDS = 1.0  # time for learning that a share of the busy time may save up


class Learner:
    """Learns for a serving head. Belongs to the engine's thread; other threads may read its counts."""

    def __init__(self, options: LearnOptions, target: Target, proposer: Proposer | None, speculation: Speculation):
        """Claim the folder, and let the version that served last serve again. Binds the serving head.

        proposer: drafts with a head; without `speculation.head`, with that of `with_new_head`. Raises ConfigError if
        there is no head or it cannot be trained, or if the folder is of another head or target; OutputError if another
        process uses it.
        """
        from eagle_mlx.train import OnlineTrainer  # not at the top, because most servers do not train

        assert options.folder is not None
        self.folder, self._share = options.folder.expanduser(), options.share
        self._target, self._speculation = target, speculation
        self._proposer, self._serving = proposer, head_of(proposer)
        self._serving.bind(target)
        self._trainer: OnlineTrainer | None = None
        self._ngrams: NgramProposer | None = None
        """N-grams that a new head must beat, with the texts that are learned, but not with those that judge."""
        digest = "none"
        if speculation.head is not None:
            first = load_found(speculation.head, target)
            self._trainer, digest = OnlineTrainer(first, target), digest_of(first)
        elif isinstance(proposer, HybridProposer):
            own = proposer.ngrams
            memory = None if own.memory is None else Memory(own.memory.limit)
            self._ngrams = NgramProposer(own.max_ngram, own.min_ngram, own.prompt_lookup, memory)
        identity = {"target": target.name, "fingerprint": fingerprint(target), "head": digest}
        self._claim = claim(self.folder, identity)
        with ExitStack() as stack:
            stack.enter_context(self._claim)
            self._open(options)
            stack.pop_all()

    def _open(self, options: LearnOptions) -> None:
        self.versions, self._drift = Versions(self.folder), DriftDetector()
        target, named = self._target, self._serving.head.named_layers
        meta = ShardMeta(target.name, target.hidden_size, target.vocab_size, named)
        self.texts = Texts(self.folder / TEXTS, bytes_of(options.disk_gb) or 0, meta)
        keeps = _keeps(options.redact, target)
        self.collector = Collector(named, target.num_layers - 1, _BUFFER_BYTES, keeps=keeps)
        self._rng = np.random.default_rng(0)
        judged = self.versions.events[-1].time if self.versions.events else 0
        self._rarity = 1
        self._remembered = 0  # the time of the newest text that n-grams remember
        self._new_tokens = sum(text.tokens for text in self._learned() if text.time > judged)
        self._cycle: Iterator[None] | None = None
        self._proven = 0  # the version that newer conversations have confirmed
        self._credit, self._failures = 0.0, 0
        self.steps = 0  # training steps so far
        if self.versions.serving:
            self._exchange(self._loaded(self._place(self.versions.serving)))
            self._trainer = None

    def __str__(self) -> str:
        version = self.versions.serving
        first = "the head serves as it is" if self._ngrams is None else "n-grams draft until a head is better"
        head = f"version {version} of the head serves" if version else first
        return f"{self.folder}, {len(self.texts.all)} texts; {head}"

    @property
    def pending(self) -> bool:
        if self._failures >= _MOST_FAILURES:
            return False
        return self._cycle is not None or self.collector.waiting or self._is_due

    @property
    def _is_due(self) -> bool:
        enough = self._new_tokens >= CYCLE_TOKENS * self._rarity
        return enough and len(_conversations(self._held_out())) >= LEAST_JUDGED

    def may_work(self, seconds: float) -> bool:
        """Return whether to do a piece of work although requests decode, after a step that took so many seconds."""
        self._credit = min(self._credit + self._share * seconds, _CREDIT_SECONDS)
        return self._credit > 0 and self.pending

    def spent(self, seconds: float) -> None:
        """Count the time of a piece of work while requests decode."""
        self._credit -= (1 - self._share) * seconds

    def work(self) -> None:
        """Do a piece of work. If it fails, the serving head stays, and the copy begins again."""
        try:
            self._absorb(1)  # at a time, because a request may wait for that
            if self._cycle is None and not self.collector.waiting and self._is_due:
                self._cycle = self._learn()
            if self._cycle is not None and next(self._cycle, self) is self:
                self._cycle, self._failures = None, 0
        except Exception as e:
            self._cycle = self._trainer = None
            self._new_tokens = 0
            self._failures += 1
            off = self._failures >= _MOST_FAILURES
            log.exception("learning failed (%s); %s", e, "it stops until a restart" if off else "it begins again")

    def close(self) -> None:
        """Write the newest texts, and let others use the folder."""
        with self._claim:
            self._absorb()

    def _absorb(self, most: int | None = None) -> None:
        """Move what was collected to the texts, at most so many."""
        while self.collector.accepted:
            tokens, rounds = self.collector.accepted.popleft()
            if rounds and self._drift.falls(tokens / rounds):
                self._rarity = 1
        for example in self.collector.take(most):
            if not is_loop(example.tokens[example.loss_mask == 1].tolist()):
                text = self.texts.add(example)
                if text is not None and not text.is_held_out:
                    self._new_tokens += text.tokens

    def _held_out(self) -> list[Text]:
        return [text for text in self.texts.all if text.is_held_out]

    def _learned(self) -> list[Text]:
        return [text for text in self.texts.all if not text.is_held_out]

    def _learn(self) -> Iterator[None]:
        """Watch the newest version; then train on new and older texts, and judge the result, with a pause after each
        piece of work."""
        self.texts.forget_deleted()
        yield from self._remember()
        yield from self._watch()
        if self._trainer is None:
            self._trainer = self._begun()
            yield
        new, self._new_tokens = self._new_tokens, 0
        start = self._trainer.tokens
        for step in range(_MOST_STEPS):
            left = 1 - max(step / _MOST_STEPS, (self._trainer.tokens - start) / (PASSES * new))
            if left <= 0:
                break
            self._trainer.step(self._drawn(new), left)  # the rate falls to 0, so that the candidate is settled
            self.steps += 1
            yield
        yield from self._challenge(self._trainer)

    def _remember(self) -> Iterator[None]:
        """Let the n-grams remember the texts to learn that they do not know yet."""
        if self._ngrams is None or self._ngrams.memory is None:
            return
        for text in self._learned():
            if text.time > self._remembered:
                self._remembered = text.time
                with suppress(FileNotFoundError):  # it has left since
                    self._ngrams.memory.add(self.texts.read(text).tokens.tolist())
                yield

    def _begun(self) -> OnlineTrainer:
        """Return a trainer that continues the serving head, or else begins a new one with the newest texts."""
        from eagle_mlx.train import OnlineTrainer, first_head

        place = self._place(self.versions.serving)
        if place is not None:
            return OnlineTrainer(load_found(place, self._target), self._target)
        examples = list(map(self.texts.read, self._newest(_BUFFER_BYTES // self.texts.token_bytes)))
        return OnlineTrainer(first_head(self._target, examples), self._target, is_new=True)

    def _newest(self, tokens: int) -> list[Text]:
        """Return the newest texts to learn, oldest first, with so many tokens in all, or a few more."""
        learned = self._learned()
        ends = list(accumulate(text.tokens for text in reversed(learned)))
        return learned[-1 - bisect_left(ends, tokens) :]

    def _drawn(self, new: int) -> list[Example]:
        """Return four examples, for the rows of a step: two of the newest texts, with `new` tokens, and two of all."""
        pools = self._newest(new), self._learned()
        chosen = [texts[self._rng.integers(len(texts))] for texts in pools for _ in range(2)]
        return [self.texts.read(text) for text in chosen]

    def _challenge(self, trainer: OnlineTrainer) -> Iterator[None]:
        """Judge the mean of the copy and what serves, and let it take over by the verdict alone."""
        shutil.rmtree(self.versions.candidate, ignore_errors=True)
        trainer.save(self.versions.candidate, {"learned": "from requests"})
        yield
        candidate = self._loaded(self.versions.candidate)
        yield
        judge = Judge(self._target, self._drafter(self.versions.serving), candidate, _DEPTH)
        yield from self._draft_along(judge, self._sample(_conversations(self._held_out())))
        took = self._event("took over", self.versions.latest + 1, judge, trainer.tokens)
        gain, keeps = took.gain, took.lost <= _MOST_LOST
        if gain.verdict == "better" and keeps:
            self.versions.take_over(took)
            self._exchange(candidate)
            trainer.took_over()
            self._rarity = 1
        else:
            self.versions.note(replace(took, outcome="not better", version=self.versions.serving))
            if gain.gain < LEAST_GAIN:  # a larger one only needs more conversations to be told
                self._rarity = min(2 * self._rarity, _RAREST)
            if gain.verdict == "worse" or not keeps:
                self._trainer = None

    def _watch(self) -> Iterator[None]:
        """Judge the serving version against the one before on newer texts, and return to that if it is worse."""
        event = self.versions.taken_over
        if event is None or event.version == self._proven:
            return
        newer = _conversations([text for text in self._held_out() if text.time > event.time])
        if len(newer) < LEAST_JUDGED:
            return
        version = self.versions.before(event.version)
        try:
            former = self._drafter(version)
        except EagleError:  # its files are gone
            return
        yield
        judge = Judge(self._target, former, self._serving, _DEPTH)
        yield from self._draft_along(judge, newer[:MOST_JUDGED])
        if judge.comparison().gain.verdict == "worse":
            self.versions.note(self._event("rolled back", version, judge, 0))
            self._exchange(former)
            self._trainer = None
        elif len(newer) >= MOST_JUDGED:
            self._proven = event.version

    def _place(self, version: int) -> Path | str | None:
        """Return the folder of a version, or the head that the server was started with; None if it had none."""
        return self.versions.path(version) if version else self._speculation.head

    def _drafter(self, version: int) -> Proposer:
        """Return what drafts while a version serves. Raises EagleError if its files are gone."""
        if not version and self._ngrams is not None:
            return self._ngrams
        return self._serving if version == self.versions.serving else self._loaded(self._place(version))

    def _exchange(self, other: Proposer) -> None:
        """Let another head serve, or n-grams alone."""
        if isinstance(other, HeadProposer):
            self._serving.exchange(other)
        self._drift = DriftDetector()  # its acceptance is compared with its own past alone
        if isinstance(self._proposer, HybridProposer):
            self._proposer.model_drafts = isinstance(other, HeadProposer)

    def _draft_along(self, judge: Judge, texts: Sequence[Text]) -> Iterator[None]:
        for text in texts:
            try:
                recording, drafted = self._recording(self.texts.read(text)), []
            except FileNotFoundError:
                continue  # it has left since, because newer texts needed its place
            for proposer in judge.proposers:
                drafted.append(draft_along(proposer, recording, _DEPTH, self._target))
                yield
            judge.drafted.append((drafted[0], drafted[1]))

    def _sample(self, texts: Sequence[Text]) -> list[Text]:
        """Return the texts to judge by, in order: the newest, and as many of the others at random."""
        if len(texts) <= MOST_JUDGED:
            return list(texts)
        newest = len(texts) - MOST_JUDGED // 2
        others = sorted(self._rng.choice(newest, MOST_JUDGED // 2, replace=False).tolist())
        return [*(texts[at] for at in others), *texts[newest:]]

    def _recording(self, example: Example) -> Recording:
        """Return a text for the judge. Drafts are greedy, so those of sampled answers are compared with one sample."""
        assert example.states is not None
        answer = max(1, int(example.loss_mask.argmax()))
        end = min(len(example), answer + _JUDGED_TOKENS)
        whole = from_16_bits(example.states.whole[: end - 1])[None].astype(self._target.dtype)
        layers = (*example.states.layers, self._target.num_layers - 1)
        states = dict(zip(layers, mx.split(whole, len(layers), axis=-1), strict=True))
        return Recording(example.tokens[:end].tolist(), answer, SamplingParams(max_tokens=_JUDGED_TOKENS), states)

    def _loaded(self, place: Path | str | None) -> HeadProposer:
        assert place is not None
        head = load_found(place, self._target)
        quantize_for(head, self._target, self._speculation.head_bits)
        loaded = HeadProposer(head, self._speculation.draft_window, self._speculation.draft_sink)
        loaded.bind(self._target)
        return loaded

    def _event(self, outcome: Outcome, version: int, judge: Judge, tokens: int) -> Event:
        comparison, older = judge.comparison(), judge.drafted[: len(judge.drafted) // 2]
        taus = (comparison.first.acceptance_length, comparison.second.acceptance_length)
        gain = gain_of([first.decoded for first, _ in older], [second.decoded for _, second in older]).gain
        lost = max(0.0, self.versions.lost - gain)
        return Event(outcome, version, *taus, comparison.gain, lost, tokens, time.time_ns())


def with_new_head(proposer: Proposer | None, target: Target, speculation: Speculation) -> Proposer | None:
    """Return n-grams with a new head, which drafts nothing yet; another proposer, or policy, as it is."""
    if not isinstance(proposer, NgramProposer) or speculation.resolved_mode() == "none" or speculation.drafter:
        return proposer
    from eagle_mlx.train import first_head

    head = first_head(target)
    quantize_for(head, target, speculation.head_bits)
    grown = HybridProposer(HeadProposer(head), proposer)
    grown.model_drafts = False
    return grown


def head_of(proposer: Proposer | None) -> HeadProposer:
    """Return the head that drafts, perhaps together with n-grams. Raises ConfigError if there is none."""
    model = proposer.model if isinstance(proposer, HybridProposer) else proposer
    if isinstance(model, HeadProposer):
        return model
    raise ConfigError("--learn needs a head, or n-grams and --spec-policy throughput to begin without one")


def _conversations(texts: Sequence[Text]) -> list[Text]:
    """Return the newest text of each conversation, oldest first."""
    newest = {text.key: text for text in texts}
    return sorted(newest.values(), key=lambda text: text.time)


def _keeps(patterns: Sequence[str], target: Target) -> Callable[[Sequence[int]], bool]:
    """Return a function that says whether tokens may be kept: none of the patterns matches their text."""
    compiled, tokenizer = [re.compile(pattern) for pattern in patterns], target.tokenizer
    if not compiled:
        return lambda tokens: True
    if tokenizer is None:
        raise ConfigError(f"--learn-redact needs a tokenizer, and {target.name} has none")

    def keeps(tokens: Sequence[int]) -> bool:
        text = tokenizer.decode(list(tokens))
        return not any(pattern.search(text) for pattern in compiled)

    return keeps
