"""Capture hidden states while generating, with or without another proposer that drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.hidden_states import Bits, HiddenStates, in_16_bits
from eagle_mlx.plan import Abilities, Plan
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState
from eagle_mlx.target import Target

_HELD = 32
"""Number of observations that are copied to the host together. A sync for each would stall the host."""
_HELD_BYTES = 256 << 20
"""Maximum bytes of these observations, without the newest. Prefill chunks have thousands of positions."""


class _Text:
    """The captured text and hidden states of one request."""

    def __init__(self) -> None:
        self.following: list[int] = []  # the token after each position
        self.states: list[Bits] = []  # hidden states of these positions in chunks, each [L, n * H]


class CapturingProposer(Proposer):
    """Captures the outputs of some layers for selected requests, and drafts with another proposer.

    Each position is captured once, in the prefill or in the round that wrote it; rejected draft positions are not. Call
    `want` before you submit a request, and `take` when it has ended. Do not use it with a prefix cache, since such
    requests do not read their whole prompts.
    """

    def __init__(self, layers: Sequence[int], inner: Proposer | None = None):
        """Capture the outputs of `layers`, counted from 0 and concatenated in this order."""
        self.layers, self.inner = tuple(layers), inner
        self.name = inner.name if inner is not None else "none"
        self.abilities = inner.abilities if inner is not None else Abilities()
        own = inner.aux_layers if inner is not None else ()
        self._inner_layers = len(own)
        self.aux_layers = (*own, *(layer for layer in self.layers if layer not in own))
        self._places = [self.aux_layers.index(layer) for layer in self.layers]
        self._wanted: Counter[tuple[int, ...]] = Counter()  # number of requests for each prompt
        self._texts: dict[tuple[int, ...], list[_Text]] = {}
        self._held: list[tuple[list[tuple[int, _Text, int]], tuple[mx.array, ...]]] = []
        """Observations still on the device: the captured rows with text and number of positions, and the layers."""

    def bind(self, target: Target) -> None:
        if self.inner is not None:
            self.inner.bind(target)

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes if self.inner is not None else 0

    def cache_size(self) -> CacheSize:
        return self.inner.cache_size() if self.inner is not None else CacheSize()

    def open(self, prompts: Sequence[Sequence[int]]) -> CapturingState:
        texts = [self._text(tuple(prompt)) for prompt in prompts]
        return CapturingState(self, texts, self.inner.open(prompts) if self.inner is not None else None)

    def want(self, prompt: Sequence[int]) -> None:
        """Capture the next request with this prompt."""
        self._wanted[tuple(prompt)] += 1

    def take(self, prompt: Sequence[int], tokens: Sequence[int]) -> HiddenStates | None:
        """Return and forget the hidden states of a request that ended with `tokens`: T positions, prompt included.

        The last of `layers` is the last layer. The final token was not read, so its states are zero; no loss uses them
        (`train.step.inputs`). Returns None if any position is missing.
        """
        self._copy_out()
        count = len(prompt) - 1 + len(tokens)
        texts = self._texts.get(tuple(prompt), [])
        text = next((t for t in texts if t.following[len(prompt) - 1 : count] == list(tokens)), None)
        self.forget(prompt, text)
        if text is None:
            return None
        return HiddenStates.split(self.layers[:-1], np.pad(np.concatenate(text.states)[:count], ((0, 1), (0, 0))))

    def forget(self, prompt: Sequence[int], text: _Text | None = None) -> None:
        """Cancel the capture of one request with this prompt; `text` selects which, if known."""
        key = tuple(prompt)
        texts = self._texts.get(key, [])
        self._texts[key] = [other for other in texts if other is not text]
        self._wanted[key] -= 1
        if self._wanted[key] <= 0:
            del self._wanted[key], self._texts[key]

    def _text(self, prompt: tuple[int, ...]) -> _Text | None:
        if not self._wanted[prompt]:
            return None
        self._texts.setdefault(prompt, []).append(text := _Text())
        return text

    def see(self, texts: Sequence[_Text | None], seen: Observation) -> Observation:
        """Capture the selected rows of an observation, and return the part for the other proposer."""
        rows = [(i, text, len(new)) for i, (text, new) in enumerate(zip(texts, seen.tokens, strict=True)) if text]
        for i, text, _ in rows:
            text.following.extend(seen.tokens[i])
        if rows:
            self._held.append((rows, tuple(seen.aux[place] for place in self._places)))
        held = sum(x.nbytes for _, aux in self._held for x in aux)
        if len(self._held) >= _HELD or held >= _HELD_BYTES:
            self._copy_out()
        return Observation(seen.tokens, seen.aux[: self._inner_layers])

    def _copy_out(self) -> None:
        """Copy captured arrays to the host. This is the only sync."""
        held, self._held = self._held, []
        joined = [in_16_bits(mx.concatenate(list(aux), axis=-1)) for _, aux in held]
        mx.eval(joined)
        for (rows, _), states in zip(held, joined, strict=True):
            copied = np.array(states)
            for i, text, count in rows:
                text.states.append(copied[i, :count].copy())


class CapturingState(ProposerState):
    """The captured rows, and the other proposer's state."""

    def __init__(self, proposer: CapturingProposer, texts: list[_Text | None], inner: ProposerState | None):
        self._proposer, self._inner = proposer, inner
        self._texts = texts

    def prefill(self, seen: Observation) -> None:
        passed = self._proposer.see(self._texts, seen)
        if self._inner is not None:
            self._inner.prefill(passed)

    def observe(self, seen: Observation) -> None:
        passed = self._proposer.see(self._texts, seen)
        if self._inner is not None:
            self._inner.observe(passed)

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        if self._inner is not None:
            return self._inner.draft(plan, sampling, positions)
        count = len(self._texts)
        return Draft(mx.zeros((count, 0), mx.int32), mx.zeros((count,), mx.int32))

    def append(self, other: CapturingState) -> None:
        self._texts += other._texts
        if self._inner is not None and other._inner is not None:
            self._inner.append(other._inner)

    def remove(self, row: int) -> None:
        self._texts = swap_removed(self._texts, row)
        if self._inner is not None:
            self._inner.remove(row)
