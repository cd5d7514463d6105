from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from eagle_mlx.progress import counted, progress_bar, tokens_per_second


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_few_updates_and_the_end(capsys: Any) -> None:
    with progress_bar(total=500, desc="capture", unit="token") as bar:
        for _ in range(500):
            bar.update()
    shown = capsys.readouterr().err
    assert shown.count("\r") <= 3
    assert shown.splitlines()[-1].startswith("capture: 100%")
    assert "500/500" in shown


def test_a_bar_yields_all_items(capsys: Any) -> None:
    assert list(progress_bar(iter("abc"), total=3)) == ["a", "b", "c"]
    assert "3/3" in capsys.readouterr().err


def test_a_disabled_bar_prints_nothing(capsys: Any) -> None:
    assert sum(progress_bar([1, 2], disable=True)) == 3
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for _ in progress_bar(range(3), mininterval=0):
        pass
    assert screen.getvalue().count("\r") >= 3


def test_counts_have_singular_and_plural() -> None:
    assert [counted(n, "conversation") for n in (0, 1, 2000)] == [
        *("0 conversations", "1 conversation", "2,000 conversations")
    ]
    assert [counted(n, "try") for n in (1, 2)] == ["1 try", "2 tries"]
    assert [tokens_per_second(rate) for rate in (0.04, 1.234, 9.96, 1234.5)] == [
        *("0.04 tokens/s", "1.2 tokens/s", "10 tokens/s", "1,234 tokens/s")
    ]
