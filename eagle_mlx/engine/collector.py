"""Collects the hidden states that decoding computes anyway, with their texts, to train heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from eagle_mlx.hidden_states import Bits, Example, HiddenStates, in_16_bits
from eagle_mlx.request_state import RequestState

CONTEXT, MOST = 512, 2048
"""Positions of a prompt, and of a text: long ones need no more memory. Conversations in training have 2,048 tokens."""
_HELD = 32
"""Observations that are copied to the host together. A copy for each would stall the host."""
_HELD_BYTES = 128 << 20
"""Maximum bytes of these observations, without the newest."""
_SHORTEST = 3
"""Tokens of a text: two to read and one to predict."""


class _Positions:
    """The collected positions of one request, without gaps."""

    def __init__(self, start: int):
        self.start = self.end = start
        self.states: list[Bits] = []  # in chunks, each [n, W]


class Collector:
    """Keeps the newest texts of requests that ended, as training examples, in a bounded buffer.

    Each position is collected once, in the prefill or in the round that wrote it; rejected draft positions are not.
    Those that come from the prefix cache have no states here, so a text begins after them. If a request is paused and
    its text is read again from an earlier position, its text begins there.
    """

    def __init__(
        self,
        layers: Sequence[int],
        last_layer: int,
        nbytes: int,
        context: int = CONTEXT,
        most: int = MOST,
        keeps: Callable[[Sequence[int]], bool] = lambda tokens: True,
    ):
        """layers: those that the head's config names; the last layer's outputs give the labels. nbytes: limit of the
        buffer. context: positions of a prompt, the last ones, that are kept for its answer. most: positions of a text.
        keeps: says of a text's tokens, with up to `context` before them, whether it may be kept."""
        self._named, self._layers = tuple(layers), (*layers, last_layer)
        self._limit, self._keeps = nbytes, keeps
        self._context, self._most = context, most
        self._texts: WeakKeyDictionary[RequestState, _Positions] = WeakKeyDictionary()
        self._held: list[tuple[list[tuple[_Positions, int, int, int]], mx.array]] = []
        """Observations on the device: texts with their row, first index and number of positions; and their states."""
        self._ended: list[tuple[_Positions, Example]] = []
        """Texts that have ended. They get their states when the observations are copied."""
        self._examples: deque[Example] = deque()
        self.nbytes = 0
        """Bytes of the examples on the host that wait to be taken."""
        self.collected = self.left_out = 0
        """Texts that were kept, and that `keeps` refused."""
        self.accepted: deque[tuple[int, int]] = deque(maxlen=1024)
        """Tokens and target forwards of the newest requests that drafted."""

    def layers_with(self, own: Sequence[int]) -> tuple[int, ...]:
        """Return the layers that a forward must return: a proposer's `own`, and then those that only learning needs."""
        return (*own, *(layer for layer in dict.fromkeys(self._layers) if layer not in own))

    def see(
        self,
        requests: Sequence[RequestState],
        starts: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[int],
        aux: Sequence[mx.array],
    ) -> None:
        """Observe positions that the target has read: of each request, `counts` positions from `starts` on.

        aux: the outputs of `layers`, each [B, L, H].
        """
        rows = []
        for row, (request, start, count) in enumerate(zip(requests, starts, counts, strict=True)):
            first = max(start, len(request.prompt) - self._context)
            if not request.params.learn or first >= start + count:
                continue
            text = self._texts.get(request)
            if text is None or (first != text.end and text.end - text.start < self._most):
                text = self._texts[request] = _Positions(first)
            taken = min(start + count - first, self._most - (text.end - text.start))
            if taken > 0:
                rows.append((text, row, first - start, taken))
                text.end += taken
        if not rows:
            return
        at = min(first for _, _, first, _ in rows)
        states = in_16_bits(mx.concatenate([aux[layers.index(layer)][:, at:] for layer in self._layers], axis=-1))
        mx.async_eval(states)  # until computed, they refer to the whole chunk and its keys
        self._held.append(([(text, row, first - at, taken) for text, row, first, taken in rows], states))
        if len(self._held) >= _HELD or sum(held.nbytes for _, held in self._held) >= _HELD_BYTES:
            self._copy_out()

    def _copy_out(self) -> None:
        """Copy the observations to the host, and keep the texts that have ended since. This is the only sync."""
        held, self._held = self._held, []
        ended, self._ended = self._ended, []
        mx.eval([states for _, states in held])
        for rows, states in held:
            copied = np.array(states)
            for text, row, first, taken in rows:
                text.states.append(copied[row, first : first + taken].copy())
        for text, example in ended:
            if sum(map(len, text.states)) == text.end - text.start:  # else some were lost with a step that failed
                whole = np.pad(np.concatenate(text.states), ((0, 1), (0, 0)))  # the final token was not read
                self._examples.append(replace(example, states=HiddenStates.split(self._named, whole)))
                self.collected += 1
                self.nbytes += whole.nbytes
        while self.nbytes > self._limit:
            self._pop()

    def ended(self, request: RequestState) -> None:
        """Keep the text of a request that has ended by itself, unless it failed or must not be learned from."""
        text = self._texts.pop(request, None)
        if text is None or request.finish_reason in ("error", "cancelled"):
            return
        if request.counts.drafted_by_position:
            self.accepted.append((len(request.tokens), request.counts.rounds))
        whole = request.text
        tokens, answer = whole[text.start : text.end + 1], max(0, len(request.prompt) - text.start)
        if len(tokens) < _SHORTEST or answer >= len(tokens):
            return
        if not self._keeps(whole[max(0, text.start - self._context) : text.end + 1]):
            self.left_out += 1
            return
        learned = [at >= answer for at in range(len(tokens))]
        self._ended.append((text, Example.of(tokens, learned, key_of(request))))

    @property
    def waiting(self) -> bool:
        """Whether there are texts to take."""
        return bool(self._ended or self._examples)

    def take(self, most: int | None = None) -> list[Example]:
        """Return and forget the examples, oldest first, at most so many."""
        if self._ended:
            self._copy_out()
        return [self._pop() for _ in range(len(self._examples))[:most]]

    def _pop(self) -> Example:
        example = self._examples.popleft()
        assert example.states is not None
        self.nbytes -= example.states.features.nbytes + example.states.last.nbytes
        return example


def key_of(request: RequestState) -> int:
    """Return a hash of a request's conversation, 64 bits: all its turns have the same."""
    named = request.request.conversation.encode() or np.array(request.prompt, np.int32).tobytes()
    return int.from_bytes(blake2b(named, digest_size=8, person=b"conversation").digest())
