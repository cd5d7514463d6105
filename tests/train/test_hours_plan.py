"""What `--hours --dry-run` foretells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.errors import ConfigError
from eagle_mlx.train.cli import main
from eagle_mlx.train.plan import hours, preflight
from eagle_mlx.train.plan.division import EVALUATION, HELD_OUT, WRITING, Rates
from eagle_mlx.train.plan.hours import Curve, curve_of, outlook
from eagle_mlx.train.plan.machine import bytes_per_second
from tests.fakes import talking_target_folder

CURVE = """
eagle:
  a: 1.0
  b: 0.25
  tokens: [100, 100000]
  model: some model
  source: docs/measurements.md
"""


@settings(max_examples=100, deadline=None)
@given(st.floats(600, 1e5), st.integers(1, 4), st.floats(5, 5000), st.floats(5, 5000))
def test_the_phases_fill_the_time(total: float, passes: int, making: float, learning: float) -> None:
    found = outlook(total, passes, Rates(making, learning))
    phases = len(found.portions)
    used = found.made / making + found.learnt / learning
    overhead = HELD_OUT + WRITING + (phases + 2) * EVALUATION
    assert used <= total * 1.01
    assert used >= total * (1 - overhead) * 0.97
    if phases > 2:
        assert found.learnt == pytest.approx(passes * found.made, rel=0.1)


def test_as_many_tokens_as_one_night_has() -> None:
    """Made at 17 tokens a second, learnt at 500: 8 hours hold 28,800 s = N / 17 + 2 N / 500, less what is measured."""
    found = outlook(8 * 3600, 2, Rates(17, 500))
    assert found.made == pytest.approx(28800 / (1 / 17 + 2 / 500) * 0.92, rel=0.03)
    assert 4 <= len(found.portions) <= 7


def test_a_curve_says_what_it_was_measured_on(tmp_path: Path) -> None:
    file = tmp_path / "curves.yaml"
    file.write_text(CURVE)
    found = curve_of("eagle", file)
    assert found == Curve(1.0, 0.25, (100, 100000), "some model", "docs/measurements.md")
    assert found.tau(10_000) == 2.0
    assert curve_of("mtp", file) is None
    file.write_text("eagle: {a: 1}")
    with pytest.raises(ConfigError, match="each kind has a, b, tokens, model and source"):
        curve_of("eagle", file)


def test_the_curves_that_come_along_can_be_read() -> None:
    for kind in ("eagle3", "eagle", "mtp"):
        found = curve_of(kind)
        assert found is None or (found.model and found.source)


def test_a_plan_of_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(preflight, "work_per_second", lambda _: 1e10)
    monkeypatch.setattr(preflight, "bytes_per_second", lambda: 1e7)
    target = talking_target_folder(tmp_path / "target")
    line = ["--target", str(target), "--output", str(tmp_path / "out"), "--head", "eagle", "--hours", "8", "--dry-run"]
    assert main(line) == 0
    plan = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert plan["run"].startswith("8 hours of making data and learning in turns")
    assert "tokens in" in plan["made"]
    assert "portions" in plan["made"]
    assert plan["tokens"].split(":")[0] == plan["made"].split()[1]
    assert "tokens/s" in plan["learnt"]
    assert plan["τ"].startswith("not foretold: no curve was measured for --head eagle")
    file = tmp_path / "curves.yaml"
    file.write_text(CURVE)
    monkeypatch.setattr(hours.curve_of, "__defaults__", (file,))
    assert main(line) == 0
    plan = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert "as some model had it, beyond the 100 to 100,000 tokens that were measured" in plan["τ"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.yaml", "target"]


def test_29_small_machines_have_a_rate_and_few_tokens_no_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(preflight, "work_per_second", lambda _: 1e6)
    monkeypatch.setattr(preflight, "bytes_per_second", lambda: 2e3)
    target = talking_target_folder(tmp_path / "target")
    line = ["--target", str(target), "--output", str(tmp_path / "out"), "--hours", "8", "--dry-run"]
    assert main(line) == 0
    plan = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert "at 0 tokens/s" not in plan["made"] + plan["learnt"]
    assert "at 0." in plan["made"]
    assert plan["τ"].startswith("not predicted: ")
    assert plan["τ"].endswith("are too few, the curve was measured from 70,000 on")


def test_what_is_read_in_a_second() -> None:
    assert bytes_per_second(lambda size: 0.5) == 4 * 4096**2 / 0.5
    assert bytes_per_second() > 1e6
