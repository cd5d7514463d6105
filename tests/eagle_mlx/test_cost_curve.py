"""A target's cost curve is measured once and read by the next engine. Bad files do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.engine import cost_curve
from eagle_mlx.engine.cost_curve import SIZES, learn_costs, measured_curve
from eagle_mlx.policy import ThroughputPolicy
from eagle_mlx.target import Target
from tests.architectures import tiny_model
from tests.fakes import tiny_head, tiny_target

TARGET = tiny_target()


def curve_of(target: Target, folder: Path, **settings: Any) -> list[tuple[float, float]]:
    """Return a new engine's initial cost curve."""
    policy = ThroughputPolicy(4)
    assert learn_costs(em.Engine(target, em.NgramProposer(), policy=policy, **settings), folder)
    return list(policy.costs.curve)


def test_a_curve_is_measured_once(tmp_path: Path) -> None:
    first = curve_of(TARGET, tmp_path)
    assert {1, 4} <= {tokens for tokens, _ in first} <= set(SIZES)  # as many as the time allows
    seconds = [took for _, took in first]
    assert 0 < seconds[0]
    assert seconds == sorted(seconds), "more tokens never count as less"
    assert curve_of(TARGET, tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1
    (_, two), *others = curve_of(TARGET, tmp_path, exact=True)  # a plain round reads two tokens
    assert others == first[1:]
    assert first[0][1] <= two <= first[1][1]


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_caches_of_every_kind_can_be_timed(name: str) -> None:
    assert len(measured_curve(em.Target(tiny_model(name)))) > 1


def test_each_target_has_its_own_curve(tmp_path: Path) -> None:
    for target in (TARGET, tiny_target(seed=1)):
        curve_of(target, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    policy = ThroughputPolicy()
    learn_costs(em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=policy), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "who drafts makes no difference"


def test_measuring_stops_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(cost_curve, "perf_counter", lambda: float(next(clock)))
    assert [tokens for tokens, _ in measured_curve(TARGET, seconds=7.0)] == [1, 4]
    assert measured_curve(TARGET, seconds=0.0) == []


def test_only_a_measuring_policy_gets_a_curve(tmp_path: Path) -> None:
    assert not learn_costs(em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(2)), tmp_path)
    assert not learn_costs(em.Engine(TARGET, policy=ThroughputPolicy()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_curve_that_cannot_be_saved_is_still_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert curve_of(TARGET, tmp_path / "file" / "folder")


SHORT, TWICE, NEGATIVE = [[1, 0.5]], [[1, 0.5], [1, 0.6]], [[1, 0.5], [2, -1]]
ENDLESS, NO_NUMBER, TEXT = ([[1, 0.5], [2, value]] for value in (float("inf"), float("nan"), "x"))


@pytest.mark.parametrize(
    "curve",
    ["no JSON", [], {}, None, 3, SHORT, TWICE, NEGATIVE, ENDLESS, NO_NUMBER, TEXT, [[0, 1], [1, 2]], [[1]]],
)
def test_a_file_that_is_damaged_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curve: Any) -> None:
    monkeypatch.setattr(cost_curve, "SIZES", (1, 2))
    curve_of(TARGET, tmp_path)
    [file] = tmp_path.iterdir()
    content = json.loads(file.read_text())
    file.write_text("{" if curve == "no JSON" else json.dumps(content | {"curve": curve}))
    assert len(curve_of(TARGET, tmp_path)) > 1
    assert json.loads(file.read_text())["about"] == content["about"]


def test_an_engine_decodes_with_a_curve_from_its_first_round_on(tmp_path: Path) -> None:
    policy, params = ThroughputPolicy(4), em.SamplingParams(max_tokens=40, ignore_eos=True)
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=policy)
    learn_costs(engine, tmp_path)
    [plain] = em.Engine(TARGET).generate([[5, 6, 7]], params)
    assert engine.generate([[5, 6, 7]], params)[0].tokens == plain.tokens
