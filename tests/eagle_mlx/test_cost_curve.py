"""A target's cost curve is measured until it can be trusted, and read by the next engine. Bad files do no harm."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx import blas
from eagle_mlx.engine import cost_curve
from eagle_mlx.engine.cost_curve import SIZES, curve_of, learn_costs, measured_times
from eagle_mlx.policy import ThroughputPolicy
from eagle_mlx.target import Target
from tests import disk_tier
from tests.architectures import tiny_model
from tests.fakes import tiny_head, tiny_target

TARGET = tiny_target()


def clock(step: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that advances by `step()` seconds at each call."""
    return itertools.accumulate(iter(step, None)).__next__


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every forward take as long as every other."""
    monkeypatch.setattr(cost_curve, "perf_counter", clock(lambda: 0.001))


def learned(target: Target, folder: Path, **settings: Any) -> list[tuple[float, float]]:
    """Return a new engine's initial cost curve."""
    curve = learn_costs(target, **settings, folder=folder)
    assert curve is not None
    return curve


@pytest.mark.usefixtures("quiet")
def test_a_curve_of_a_quiet_machine_is_measured_once(tmp_path: Path) -> None:
    first = learned(TARGET, tmp_path)
    assert {tokens for tokens, _ in first} == set(SIZES)
    seconds = [took for _, took in first]
    assert 0 < seconds[0]
    assert seconds == sorted(seconds), "more tokens never count as less"
    assert learned(TARGET, tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1
    (_, two), *others = learned(TARGET, tmp_path, exact=True)  # a plain round reads two tokens
    assert others == first[1:]
    assert first[0][1] <= two <= first[1][1]


def test_a_busy_machine_does_not_spoil_the_curve_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(step: Callable[[], float]) -> set[float]:
        monkeypatch.setattr(cost_curve, "perf_counter", clock(step))
        return {round(seconds, 6) for _, seconds in learned(TARGET, tmp_path)}

    load = itertools.count()
    assert max(start(lambda: 0.001 * 1.03 ** next(load))) > 0.0015  # no two times of a size agree
    assert start(lambda: 0.001) == {0.001}
    assert start(lambda: 0.0001) == {0.001}, "nothing is measured again"


def test_a_slow_target_is_measured_at_several_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_curve, "perf_counter", clock(lambda: 0.1))
    sizes = [len(learned(TARGET, tmp_path)) for _ in range(9)]
    assert sizes[0] in range(2, 5)
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(SIZES)


def test_a_curve_shows_what_a_forward_takes_at_most() -> None:
    assert curve_of({1: [0.010, 0.011], 2: [0.5], 4: [0.012, 0.9], 8: [0.5]}) == [
        (1, 0.010),
        (2, 0.012),  # no longer than four tokens
        (4, 0.012),
        (8, 0.080),  # no longer than eight forwards of one token
    ]


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_caches_of_every_kind_can_be_timed(name: str) -> None:
    assert len(measured_times(em.Target(tiny_model(name)))) > 1


@pytest.mark.usefixtures("quiet")
def test_each_target_has_its_own_curve(tmp_path: Path) -> None:
    for target in (TARGET, tiny_target(seed=1)):
        learned(target, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("quiet")
def test_each_machine_and_each_precision_of_the_cache_has_its_own_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = disk_tier.target("quantised")
    learned(target, tmp_path)
    for files, bits in enumerate((4, 8), 2):
        learned(target, tmp_path, kv_bits=bits)
        assert len(list(tmp_path.iterdir())) == files
    machine = cost_curve.describe()
    monkeypatch.setattr(cost_curve, "describe", lambda: replace(machine, cpu="another"))
    learned(target, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.usefixtures("quiet")
@pytest.mark.skipif(not blas.blas_threads(), reason="another BLAS")
def test_each_number_of_blas_threads_has_its_own_curve(tmp_path: Path) -> None:
    with blas.one_blas_thread(True):  # restores the number at its end
        learned(TARGET, tmp_path)
        blas.set_blas_threads(2)
        learned(TARGET, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_measuring_stops_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(cost_curve, "perf_counter", lambda: float(next(clock)))
    assert list(measured_times(TARGET, seconds=7.0)) == [1, 4]
    assert measured_times(TARGET, seconds=0.0) == {}


def test_a_curve_that_cannot_be_saved_is_still_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert learned(TARGET, tmp_path / "file" / "folder")


NEGATIVE, EMPTY, NOT_A_SIZE, SINGLE = {"1": [0.5], "2": [-1]}, {"1": []}, {"0": [0.5]}, {"1": 0.5}
ENDLESS, NO_NUMBER, TEXT = ({"1": [0.5], "2": [value]} for value in (float("inf"), float("nan"), "x"))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "times",
    ["no JSON", [], None, 3, NEGATIVE, EMPTY, NOT_A_SIZE, SINGLE, ENDLESS, NO_NUMBER, TEXT],
)
def test_a_file_that_is_damaged_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: Any) -> None:
    monkeypatch.setattr(cost_curve, "SIZES", (1, 2))
    fresh = learned(TARGET, tmp_path)
    [file] = tmp_path.iterdir()
    content = json.loads(file.read_text())
    file.write_text("{" if times == "no JSON" else json.dumps(content | {"times": times}))
    np.testing.assert_allclose(learned(TARGET, tmp_path), fresh)
    assert json.loads(file.read_text())["about"] == content["about"]


def test_an_engine_decodes_with_a_curve_from_its_first_round_on(tmp_path: Path) -> None:
    params = em.SamplingParams(max_tokens=40, ignore_eos=True)
    policy = ThroughputPolicy(4, curve=learned(TARGET, tmp_path))
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=policy)
    [plain] = em.Engine(TARGET).generate([[5, 6, 7]], params)
    assert engine.generate([[5, 6, 7]], params)[0].tokens == plain.tokens
