"""Judge two heads on the same answers of the target: each drafts along them, round by round, as in decoding.

A greedy or seeded answer is the target's own, whatever drafts. So the target writes each answer once, and reads it once
for its hidden states; then only the heads compute. Each begins its rounds where its former round ended. N-grams may
need a round more in decoding, where a plain round is dispatched before the text that would match is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from statistics import median
from time import perf_counter

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.engine import Engine
from eagle_mlx.engine.cost_curve import Curve
from eagle_mlx.errors import EagleError
from eagle_mlx.paired import Decoded, Gain, gain_of, tau
from eagle_mlx.plan import PREFILL_CHUNK, Plan
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers.base import Observation, Proposer, check_draft
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import common_prefix, is_loop


@dataclass(frozen=True)
class Recording:
    """A text of the target, and the hidden states from which heads draft it."""

    text: Sequence[int]
    """The prompt and the answer."""
    answer: int
    """The index in the text at which the answer begins."""
    params: SamplingParams
    """Those of the answer, with a seed unless it is greedy."""
    states: Mapping[int, mx.array]
    """The outputs of layers, counted from 0, at all positions but the last: [1, T - 1, H] each."""

    def seen(self, start: int, end: int, layers: Sequence[int]) -> Observation:
        """Return what a proposer observes when the target has read the positions from `start` to `end`."""
        states = tuple(self.states[layer][:, start:end] for layer in layers)
        return Observation([list(self.text[start + 1 : end + 1])], states)


@dataclass(frozen=True)
class Drafting:
    """The drafts of a proposer along one recording."""

    accepted: list[int]
    """Draft tokens that each round accepted."""
    drafted: int
    """Tokens of the longest draft."""
    seconds: list[float]
    """Time of each draft, and of reading the hidden states before it."""
    decoded: Decoded


@dataclass(frozen=True)
class Figures:
    """One head's figures over all conversations."""

    acceptance_length: float
    acceptance_by_position: list[float]
    """The share of rounds that accepted the draft token at each position."""
    rounds: int
    drafted: int
    draft_seconds: float
    """The median, with the hidden states that the head reads first."""
    round_seconds: float | None
    tokens_per_second: float | None
    """Expected of one request by the target's cost curve; None without a curve."""


@dataclass(frozen=True)
class Comparison:
    """Two heads on the same answers."""

    first: Figures
    second: Figures
    acceptance: Gain
    """In tokens per target forward."""
    speed: Gain | None
    """In expected tokens per second; None without a cost curve."""
    depth: int
    tokens: int
    left_out: int
    """Prompts that were left out because the target's answer loops."""

    @property
    def gain(self) -> Gain:
        """The gain that decides: in speed, if it is known."""
        return self.speed or self.acceptance


class Judge:
    """Lets two proposers draft along the same recordings, in chains of `depth` tokens, and compares them."""

    def __init__(self, target: Target, first: Proposer, second: Proposer, depth: int = 4):
        """Bind the proposers. Raises an EagleError if one does not fit the target."""
        self.target, self.depth = target, depth
        self.proposers = (first, second)
        for proposer in self.proposers:
            proposer.bind(target)
        self.layers = tuple(sorted({layer for proposer in self.proposers for layer in proposer.aux_layers}))
        """The layers that recordings need."""
        self.left_out = 0
        self.drafted: list[tuple[Drafting, Drafting]] = []
        """The drafts of both along each recording."""

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        curve: Curve | None = None,
        progress: bool = True,
    ) -> Comparison:
        """Have the target answer the prompts, and compare. Raises EagleError if all answers loop, or one fails.

        params: of all answers; those that are sampled get the seeds 0, 1, … and are compared by the coupled rule.
        curve: the target's cost curve, for expected speeds (`engine.cost_curve`).
        """
        with progress_bar(total=len(prompts), desc="judging", unit="prompt", disable=not progress) as bar:
            for recording in record(self.target, self.layers, prompts, params):
                if recording is None:
                    self.left_out += 1
                else:
                    a, b = (draft_along(proposer, recording, self.depth, self.target) for proposer in self.proposers)
                    self.drafted.append((a, b))
                bar.update()
        if not self.drafted:
            raise EagleError(f"the target's answers to all {len(prompts)} prompts loop; use other prompts")
        return self.comparison(curve)

    def comparison(self, curve: Curve | None = None) -> Comparison:
        """Compare the proposers over all recordings so far, at least one."""
        before, after = ([pair[at] for pair in self.drafted] for at in (0, 1))
        costs = [median(chain.from_iterable(part.seconds for part in drafted)) for drafted in (before, after)]
        a, b = self.proposers
        if (a.name, a.weight_bytes) == (b.name, b.weight_bytes):
            costs = [min(costs)] * 2  # they cost the same, and only noise of the machine tells otherwise
        first, second = _figures(before, costs[0], curve, self.depth), _figures(after, costs[1], curve, self.depth)
        old, new = ([part.decoded for part in drafted] for drafted in (before, after))
        speed = None
        if first.round_seconds is not None and second.round_seconds is not None:
            speed = gain_of(old, new, first.round_seconds / second.round_seconds)
        tokens = sum(part.tokens for part in old)
        return Comparison(first, second, gain_of(old, new), speed, self.depth, tokens, self.left_out)


def record(
    target: Target, layers: Sequence[int], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[Recording | None]:
    """Have the target answer the prompts; yield a recording of each answer, or None if it loops.

    layers: those whose states are kept. params: see `Judge.compare`. Raises EagleError if an answer fails.
    """
    engine, seeds = Engine(target), count()
    for start in range(0, len(prompts), engine.max_batch):
        group = [list(prompt) for prompt in prompts[start : start + engine.max_batch]]
        own = [replace(params, seed=next(seeds), acceptance="coupled") for _ in group]
        for prompt, answered, output in zip(group, own, engine.generate(group, own), strict=True):
            if output.error is not None:
                raise EagleError(f"the target cannot answer a prompt of {len(prompt)} tokens: {output.error}")
            loops = is_loop(output.tokens)
            yield None if loops else read_text(target, layers, [*prompt, *output.tokens], len(prompt), answered)


def read_text(
    target: Target, layers: Sequence[int], text: Sequence[int], answer: int, params: SamplingParams
) -> Recording:
    """Return a text of the target with its states. `answer`, `params`: see `Recording`."""
    states = target.forward(mx.array([text[:-1]], mx.int32), aux_layers=layers).aux
    mx.eval(states)
    return Recording(text, answer, params, dict(zip(layers, states, strict=True)))


def draft_along(proposer: Proposer, recording: Recording, depth: int, target: Target) -> Drafting:
    """Let a proposer, bound to the target, draft a recorded answer in chains as the engine would."""
    state, layers, text = proposer.open([recording.text[: recording.answer]]), proposer.aux_layers, recording.text
    state.enter([""])  # the namespace of requests without a key: n-grams may have a memory
    read = recording.answer - 1  # the first round reads the prompt's last token
    for start in range(0, read, PREFILL_CHUNK):
        state.prefill(recording.seen(start, min(start + PREFILL_CHUNK, read), layers))
    sampling = SamplingBatch.of([recording.params], [recording.params.seed or 0])
    plan, accepted, longest, seconds = Plan(depth), list[int](), 0, list[float]()
    while (left := len(text) - read - 1) > 0:
        began = perf_counter()
        draft = state.draft(plan, sampling, mx.array([read + 1], mx.int32))
        newest, room = mx.array([[text[read]]], mx.int32), recording.answer + recording.params.max_tokens - read - 2
        draft = check_draft(draft, proposer.name, plan, [room], target.vocab_size, newest, None)
        tokens = np.array(draft.tokens)[0, : draft.lengths.item()].tolist()
        seconds.append(perf_counter() - began)
        matching = common_prefix(tokens, list(text[read + 1 : read + 1 + len(tokens)]))
        taken = min(matching + 1, left)
        state.observe(recording.seen(read, read + taken, layers))
        read += taken
        accepted.append(matching)
        longest = max(longest, len(tokens))
    return Drafting(accepted, longest, seconds, Decoded(len(text) - recording.answer, len(accepted)))


def _figures(drafted: Sequence[Drafting], draft_seconds: float, curve: Curve | None, depth: int) -> Figures:
    accepted = np.array([count for part in drafted for count in part.accepted])
    length, longest = tau([part.decoded for part in drafted]), max(part.drafted for part in drafted)
    seconds = None
    if curve is not None:  # a forward over the newest token and the draft, and the draft
        sizes, times = zip(*curve, strict=True)
        seconds = draft_seconds + float(np.interp(1 + longest, sizes, times))
    return Figures(
        acceptance_length=length,
        acceptance_by_position=[float((accepted > place).mean()) for place in range(depth)],
        rounds=len(accepted),
        drafted=longest,
        draft_seconds=draft_seconds,
        round_seconds=seconds,
        tokens_per_second=None if seconds is None else length / seconds,
    )
