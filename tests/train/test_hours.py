"""`--hours`: data and learning in turns, with a clock of its own that counts forwards and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.catalog.head_registry import records_for
from eagle_mlx.data_pipelines import Limits, MakeConfig, Wanted, make_to_file, making_engine, prompt_keys
from eagle_mlx.engine import Engine
from eagle_mlx.target import Target, fingerprint, load_target
from eagle_mlx.train.command import Stopped
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.hours import portions, train_for_hours
from eagle_mlx.train.hours.division import FIRST, Rates, is_last, next_portion, seconds_to_learn
from eagle_mlx.train.run import Stopwatch
from eagle_mlx.train.step import Phase, Stepper
from tests.fakes import talking_target_folder

HOURS = 0.04
SHORT = partial(MakeConfig, user_tokens=30, max_tokens=12)


class Clock:
    """Time that goes by with the work that is done, so that every run of a test has the same."""

    def __init__(self, patch: pytest.MonkeyPatch, forward: float = 0.1, token: float = 1 / 400):
        self.now = 0.0
        step, learn = Engine.step, Stepper.__call__

        def timed_step(engine: Engine) -> Any:
            self.now += forward
            return step(engine)

        def timed_learning(stepper: Stepper, rows: Any, factor: float) -> Any:
            result = learn(stepper, rows, factor)
            self.now += token * (result.tokens if result is not None else 0)
            return result

        patch.setattr(Engine, "step", timed_step)
        patch.setattr(Stepper, "__call__", timed_learning)

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(talking_target_folder(tmp_path_factory.mktemp("talker") / "tiny", seed=2))


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models loop when they are greedy, up to the end of a turn."""
    monkeypatch.setattr(portions, "MakeConfig", SHORT)


def config_of(output: Path, **more: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        **{"target": "tiny", "data": ("self",), "hours": HOURS, "states": "disk", "head": "eagle", "lr": 3e-3},
        **{"rows": 4, "length": 64, "eval_prompts": 8, "eval_tokens": 6, "eval_depth": 2, "lanes": 1},
    }
    return TrainConfig.of(output=str(output), **{**settings, **more})


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any], float]]:
    """A run that nothing interrupted: its folder, its report, the time that it took."""
    out = tmp_path_factory.mktemp("whole") / "head"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "MakeConfig", SHORT)
        clock = Clock(patch)
        report = train_for_hours(target, config_of(out), watch=Stopwatch(clock))
    yield out, report, clock.now


def test_from_nothing_to_a_head_in_the_time_given(whole: tuple[Path, dict[str, Any], float], target: Target) -> None:
    out, report, seconds = whole
    print(json.dumps(report["data"], indent=1), seconds)
    assert 0.97 * 3600 * HOURS < seconds < 1.03 * 3600 * HOURS
    assert (out / "best" / "config.json").exists()
    assert json.loads((out / "report.json").read_text()) == report
    assert not (out / "checkpoints").exists()
    assert any(record.head == str(out / "best") for record in records_for(("tiny",), fingerprint(target)))
