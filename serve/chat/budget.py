"""A limit on the tokens of a thought. After them, the model may only write the thought's end tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from eagle_mlx.sampling_params import Grammar

from .families import templates
from .template import ChatFormat

_OPENING, _ENDED = -1, -2  # states of an answer; while it thinks, its state is the number of tokens of the thought
_LONGEST_OPENING = 64  # tokens of an answer in which its thought must begin, blanks included


def with_budget(
    format: ChatFormat, vocab: int, most: int | None, is_open: bool, inner: Callable[[], Grammar] | None = None
) -> Callable[[], Grammar] | None:
    """Return a factory for a grammar that ends a thought at the beginning of an answer after `most` tokens.

    is_open: whether the prompt opens the thought. inner: a factory for another grammar that the answer must follow; it
    is returned if there is no limit, or if the model has no tags of thoughts.
    """
    tokenizer, end = format.tokenizer, format.thoughts.think_end
    if most is None or not end:
        return inner
    source = templates(tokenizer)
    is_on_own_line = f"\\n{end}" in source or f"\n{end}" in source
    tag = tokenizer.encode(f"\n{end}" if is_on_own_line else end, add_special_tokens=False)
    if end not in tokenizer.decode(tag):
        return inner
    return lambda: BudgetedThought(format, tag, vocab, most, is_open, inner() if inner else None)


class BudgetedThought:
    """A grammar that only forces the end of a thought, unless the answer must also follow another one."""

    def __init__(self, format: ChatFormat, tag: list[int], vocab: int, most: int, is_open: bool, inner: Grammar | None):
        """tag: the tokens that end a thought. For the others, see `with_budget`."""
        self._decode, self._tag = format.tokenizer.decode, tag
        self._start, self._end = format.thoughts.think_start, format.thoughts.think_end
        self._vocab, self._most = vocab, most
        self._inner = inner
        self._tokens = list[int]()
        self._states = [0 if is_open else _OPENING]  # before the first token, and after each

    @property
    def free_tokens(self) -> int:
        """The number of next tokens that may be any."""
        if self._inner is not None:
            return 0
        state = self._states[-1]
        return 1 << 30 if state == _ENDED else max(0, self._most - max(state, 0))

    def mask(self) -> mx.array:
        allowed = self._inner.mask() if self._inner is not None else mx.ones(self._vocab, mx.bool_)
        if self._states[-1] < self._most or self._decode(self._tokens[-4:]).endswith("\ufffd"):  # within a character
            return allowed
        written = range(min(len(self._tag) - 1, self._states[-1]), 0, -1)
        count = next((count for count in written if self._tokens[-count:] == self._tag[:count]), 0)
        forced = (mx.arange(self._vocab) == self._tag[count]) & allowed
        return forced if self._inner is None or forced.any().item() else allowed

    def advance(self, token: int) -> bool:
        if self._inner is not None and not self._inner.advance(token):
            return False
        self._tokens.append(token)
        self._states.append(self._next())
        return True

    def rollback(self, count: int) -> None:
        if self._inner is not None:
            self._inner.rollback(count)
        del self._tokens[len(self._tokens) - count :], self._states[len(self._states) - count :]

    def forced(self, most: int) -> Sequence[int]:
        if self._states[-1] == self._most:
            return self._tag[:most]
        return self._inner.forced(most) if self._inner is not None else []

    def _next(self) -> int:
        state = self._states[-1]
        if state == _OPENING:
            text = self._decode(self._tokens).lstrip()
            if self._start and text.startswith(self._start):
                return 0
            may_begin = self._start.startswith(text) and len(self._tokens) < _LONGEST_OPENING
            return _OPENING if may_begin else _ENDED
        if state == _ENDED or self._end in self._decode(self._tokens[-len(self._end) :]):
            return _ENDED
        return state + 1
