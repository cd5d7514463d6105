"""Progress bars, and counts and rates in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_SECONDS = 30.0  # seconds between updates if stderr is not a terminal


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 token`, `2,000 tokens`. The plural is formed with -s, or -ies for -y."""
    if number == 1:
        return f"1 {noun}"
    ends = noun[-1] == "y" and noun[-2] not in "aeiou"
    return f"{number:,} {noun[:-1]}ies" if ends else f"{number:,} {noun}s"


def tokens_per_second(rate: float) -> str:
    """Format a rate with at least two digits, because small machines make less than one token per second."""
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"


def progress_bar(iterable: Iterable[Any] | None = None, **settings: Any) -> tqdm[Any]:
    """Return a tqdm bar on stderr; in a log, it is updated only every LOG_SECONDS."""
    from tqdm import tqdm  # not at the top: most of --help would be this import

    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(iterable, **({} if on_terminal else {"mininterval": LOG_SECONDS}) | settings)


def show_step(bar: tqdm[Any], text: str, first: bool = False) -> None:
    """Show a text after a bar, as often as the bar is drawn. first: a new step, which a terminal shows at once."""
    if not bar.disable:
        bar.miniters = 0
        bar.set_postfix_str(text, refresh=first and bar.mininterval < LOG_SECONDS)
        bar.update(0)
