from __future__ import annotations

import re
from typing import Any

import pytest

from eagle_mlx.train.run.state import Bar, Progress
from eagle_mlx.train.step.step import StepResult

RESULT = StepResult(
    loss=2.5, loss_by_step=[2.5], accuracy_by_step=[0.5, 0.25], grad_norm=1.0, tokens=100, loss_tokens=50
)


def test_the_bar_shows_the_remaining_time(capsys: Any) -> None:
    with Bar(steps=40) as bar:
        bar.show(3.0, Progress(step=30, tokens=3000, train_seconds=3.0), [RESULT])
    shown = capsys.readouterr().err
    assert "30/40 steps" in shown
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d", shown), "elapsed and left"
    assert "loss 2.500, accuracy 0.50 0.25, 1,000 tokens/s" in shown


@pytest.mark.parametrize("span", [{"steps": 1000}, {"seconds": 1000.0}])
def test_the_remaining_time_ignores_steps_before_a_resume(span: dict[str, Any], capsys: Any) -> None:
    with Bar(**span, done=500) as bar:
        bar.bar.start_t -= 100  # 100 steps or seconds took 100 seconds since then
        bar.show(600.0, Progress(step=600), [RESULT])
    assert "600/1000" in (shown := capsys.readouterr().err)
    assert "<06:4" in shown or "<06:3" in shown, "400 more at the same rate"


@pytest.mark.parametrize("done", [0.0, 75.0])
def test_the_bar_does_not_exceed_the_time_limit(done: float, capsys: Any) -> None:
    """A run may be killed in its last measurement, after its time."""
    with Bar(60.0, done=done) as bar:
        bar.show(76.0)
    assert "60/60 s" in capsys.readouterr().err
