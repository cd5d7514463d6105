from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from tqdm import tqdm

from eagle_mlx import progress
from eagle_mlx.progress import counted, progress_bar, tokens_per_second


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_short_job_writes_one_line_to_a_log(capsys: Any) -> None:
    with progress_bar(total=500, desc="capture", unit="token") as bar:
        for _ in range(500):
            bar.update()
            bar.set_postfix_str("fast")
            tqdm.write("a word")
    shown = capsys.readouterr().err
    assert "\r" not in shown
    (line,) = shown.splitlines()
    assert line.startswith("capture: 100%")
    assert "500/500" in line
    assert "fast" in line


def test_a_log_gets_a_line_every_half_minute(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress_bar(total=1000, bar_format="{n} of {total}") as bar:
        for _ in range(950):  # 95 seconds
            now += 0.1
            bar.update()
            bar.refresh()
    lines = [int(line.split()[0]) for line in capsys.readouterr().err.splitlines()]
    assert lines == pytest.approx([300, 600, 900, 950], abs=2)


def test_a_bar_yields_all_items(capsys: Any) -> None:
    assert list(progress_bar(iter("abc"), total=3)) == ["a", "b", "c"]
    assert "3/3" in capsys.readouterr().err


def test_a_bar_shows_its_progress_after_an_error(capsys: Any) -> None:
    def work() -> None:
        with progress_bar(total=4) as bar:
            bar.update(3)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        work()
    assert "3/4" in capsys.readouterr().err


def test_a_disabled_bar_prints_nothing(capsys: Any) -> None:
    assert sum(progress_bar([1, 2], disable=True)) == 3
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for _ in progress_bar(range(3), mininterval=0):
        pass
    assert screen.getvalue().count("\r") >= 3


def test_29_counts_have_singular_and_plural() -> None:
    assert [counted(n, "conversation") for n in (0, 1, 2000)] == [
        *("0 conversations", "1 conversation", "2,000 conversations")
    ]
    assert [counted(n, "try") for n in (1, 2)] == ["1 try", "2 tries"]
    assert [tokens_per_second(rate) for rate in (0.04, 1.234, 9.96, 1234.5)] == [
        *("0.04 tokens/s", "1.2 tokens/s", "10 tokens/s", "1,234 tokens/s")
    ]
