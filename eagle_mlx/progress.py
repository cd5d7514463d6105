"""Progress bars: redrawn in place on a terminal, a line now and then in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar, overload

from tqdm import tqdm

LINE_SECONDS = 30.0
"""Seconds between the lines of a bar that goes to no terminal."""

T = TypeVar("T")


def counted(number: int, noun: str) -> str:
    """A number and what it counts: `1 token`, `2,000 tokens`. The plural is made with an s, or ies for y."""
    if number == 1:
        return f"1 {noun}"
    ends = noun[-1] == "y" and noun[-2] not in "aeiou"
    return f"{number:,} {noun[:-1]}ies" if ends else f"{number:,} {noun}s"


def tokens_per_second(rate: float) -> str:
    """A rate in words, with two digits at least, since small machines make less than one token a second."""
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"


@overload
def progress_bar(iterable: Iterable[T], **settings: Any) -> tqdm[T]: ...


@overload
def progress_bar(iterable: None = None, **settings: Any) -> tqdm[NoReturn]: ...


def progress_bar(iterable: Iterable[Any] | None = None, **settings: Any) -> tqdm[Any]:
    """A tqdm bar on stderr with tqdm's own settings, which does not fill a log with redrawn lines."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(iterable, **settings) if on_terminal else _Lines(iterable, **settings)


class _Lines(tqdm):  # type: ignore[type-arg]  # not generic at run time
    """Whole lines without carriage returns: one every LINE_SECONDS, and one at the end."""

    def __init__(self, iterable: Iterable[Any] | None = None, **settings: Any):
        self._shown = time.monotonic()
        super().__init__(iterable, mininterval=LINE_SECONDS, leave=False, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS:
            self._shown = now
            print(self, file=self.fp, flush=True)

    def clear(self, nolock: bool = False) -> None:
        """Lines stay."""

    def close(self) -> None:
        if not self.disable:
            self._shown = -math.inf
            self.display()
        super().close()
