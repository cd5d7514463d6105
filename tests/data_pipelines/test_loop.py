"""The batch doubles while throughput increases, and does not affect the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.data_pipelines import cli
from eagle_mlx.data_pipelines.synthesis import loop
from eagle_mlx.data_pipelines.synthesis.loop import Doubling
from eagle_mlx.engine import Engine
from tests.fakes import talking_target_folder


def settle(doubling: Doubling, seconds: Callable[[int], float], prompts: int = 3) -> int:
    """Return the final batch size if a round of n rows takes this long. Each size starts with some slow rounds."""
    for _ in range(100):
        for taken in range(prompts):
            doubling.add(doubling.rows - prompts + taken, 1, 1e6)
        doubling.add(doubling.rows, 1, 1e6)
        rows = doubling.rows
        while doubling.rows == rows and not doubling.settled:
            doubling.add(rows, rows, seconds(rows))
        if doubling.settled:
            return doubling.rows
    raise AssertionError("it never settles")


def test_rows_that_cost_nothing_are_taken_up_to_the_most() -> None:
    assert settle(Doubling(4, most=64), lambda rows: 1.0) == 64
    assert settle(Doubling(4, most=63), lambda rows: 1.0) == 32


def test_rows_that_cost_as_much_as_they_make_are_given_back() -> None:
    assert settle(Doubling(32), lambda rows: rows / 32) == 32
    assert settle(Doubling(4), lambda rows: max(1.0, rows / 16)) == 16


@given(st.integers(0, 8), st.floats(0.1, 10))
def test_it_stops_where_arithmetic_is_the_slower_part(log_rows: int, machine: float) -> None:
    """A round takes as long as reading or as arithmetic for its rows, whichever is longer."""
    enough = 1 << log_rows
    assert settle(Doubling(1), lambda rows: machine * max(1.0, rows / enough)) == enough


def test_rounds_with_places_left_are_not_judged() -> None:
    doubling = Doubling(8)
    for _ in range(1000):
        doubling.add(7, 7, 1.0)
    assert (doubling.rows, doubling.settled) == (8, False)


def test_a_file_is_the_same_while_rows_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eagle_mlx.data_pipelines.synthesis.loop.FIRST_ROWS", 1)
    monkeypatch.setattr(loop, "ROUNDS", 2)
    monkeypatch.setattr(loop, "WORTH", 0.0)
    engines: list[Engine] = []

    def growing(*args: Any) -> Engine:
        engines.append(loop.growing_engine(*args))
        return engines[-1]

    monkeypatch.setattr("eagle_mlx.data_pipelines.commands.growing_engine", growing)
    model = talking_target_folder(tmp_path / "model")
    flags = ["--target", str(model), "--max-tokens", "8", "--output"]
    make = ["make", "--rows", "4", "--user-tokens", "30", *flags]
    assert cli.main([*make, str(tmp_path / "grown.jsonl")]) == 0
    assert cli.main([*make, str(tmp_path / "fixed.jsonl"), "--batch", "2"]) == 0
    assert (tmp_path / "grown.jsonl").read_bytes() == (tmp_path / "fixed.jsonl").read_bytes()
    answer = ["regenerate", "--data", str(tmp_path / "fixed.jsonl"), "--split", "all", *flags]
    assert cli.main([*answer, str(tmp_path / "answers.jsonl")]) == 0
    assert cli.main([*answer, str(tmp_path / "again.jsonl"), "--batch", "2"]) == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    assert [engine.max_batch for engine in engines[1::2]] == [2, 2], "--batch N is N"
    assert engines[0].max_batch > 1
