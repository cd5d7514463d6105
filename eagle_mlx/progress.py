"""Progress bars: redrawn in place on a terminal, occasional lines in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar, overload

from tqdm import tqdm

LINE_SECONDS = 30.0
"""Seconds between lines if stderr is not a terminal."""

T = TypeVar("T")


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 token`, `2,000 tokens`. The plural is formed with -s, or -ies for -y."""
    if number == 1:
        return f"1 {noun}"
    ends = noun[-1] == "y" and noun[-2] not in "aeiou"
    return f"{number:,} {noun[:-1]}ies" if ends else f"{number:,} {noun}s"


def tokens_per_second(rate: float) -> str:
    """Format a rate with at least two digits, because small machines make less than one token per second."""
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"


@overload
def progress_bar(iterable: Iterable[T], **settings: Any) -> tqdm[T]: ...


@overload
def progress_bar(iterable: None = None, **settings: Any) -> tqdm[NoReturn]: ...


def progress_bar(iterable: Iterable[Any] | None = None, **settings: Any) -> tqdm[Any]:
    """Return a tqdm bar on stderr. If stderr is not a terminal, it prints a few whole lines instead of redrawing."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(iterable, **settings) if on_terminal else _Lines(iterable, **settings)


class _Lines(tqdm):  # type: ignore[type-arg]  # not generic at run time
    """A bar of whole lines without carriage returns: one every LINE_SECONDS, and one at the end."""

    def __init__(self, iterable: Iterable[Any] | None = None, **settings: Any):
        self._shown = time.monotonic()
        super().__init__(iterable, mininterval=LINE_SECONDS, leave=False, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS:
            self._shown = now
            print(self, file=self.fp, flush=True)

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: lines stay."""

    def close(self) -> None:
        if not self.disable:
            self._shown = -math.inf
            self.display()
        super().close()
