"""A plan for a machine that is described, and not for the one at hand: a target of 32 billion parameters on Macs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.memory import device_memory
from eagle_mlx.train.config import TrainConfig, from_mapping
from eagle_mlx.train.plan import estimate
from eagle_mlx.train.plan.fit import as_flags, check_fits, fitting, memory_on
from eagle_mlx.train.plan.machine import Machine, work_per_second
from eagle_mlx.train.plan.preflight import Forecast, as_text, assumed, forecast
from eagle_mlx.train.plan.recipe import load_recipe

WORKING_SET_64 = 51_539_607_552
"""What Metal recommends on a Mac of 64 GB, as llama.cpp prints it: recommendedMaxWorkingSetSize = 51539.61 MB."""
INFO_64 = {"memory_size": 64 << 30, "max_recommended_working_set_size": WORKING_SET_64}
MAC_64 = Machine(device_memory(INFO_64) or 0, gpu=True)


def planned(machine: Machine, folder: Path, **changes: object) -> Forecast:
    recipe = load_recipe("qwen3-32b")
    config = from_mapping({**recipe.settings, "output": str(folder / "out"), "states": "online", **changes})
    return forecast(config, recipe.model, assumed(config, recipe.tokens_each), machine=machine)


def changes_for(found: Forecast) -> dict[str, object] | None:
    return fitting(found.machine, found.target, found.head, found.config, online=True)


def test_a_mac_counts_what_metal_recommends_and_not_all_its_memory() -> None:
    assert MAC_64.memory == WORKING_SET_64
    assert MAC_64.gpu
    assert MAC_64.device == mx.Device(mx.gpu)


def test_the_recipe_for_32_billion_parameters_fits_a_mac_of_64_gb(tmp_path: Path) -> None:
    found = planned(MAC_64, tmp_path)
    assert 17e9 < found.target.weights < 19e9, "4 bits and their scales"
    assert changes_for(found) == {}
    check_fits(found.machine, found.target, found.head, found.config, online=True)
    step = found.config.optimization
    assert (step.rows, step.accumulate, step.grad_checkpoint) == (8, 8, True)
    assert "8 rows of 1,024 tokens in 8 parts, in bfloat16" in as_text(found, 1e13)
    assert found.memory.optimizer == 2 * found.memory.head == 8 * found.head.parameters, "float32 masters and moments"


def test_seven_draft_steps_take_hardly_more_than_two_for_their_gradients(tmp_path: Path) -> None:
    """15 GB more were foretold when the gradients of all steps were kept."""
    few, many = (planned(MAC_64, tmp_path, unroll=steps, length=64).memory.step for steps in (2, 7))
    assert many - few < 1e9


def test_what_does_not_fit_is_given_settings_that_do(tmp_path: Path) -> None:
    found = planned(MAC_64, tmp_path, accumulate=1, grad_checkpoint=False, dtype="float32", length=2048)
    changes = changes_for(found)
    assert changes
    step = found.config.changed(**changes).optimization
    assert (step.rows, step.length) == (8, 2048), "the batch stays"
    assert step.accumulate > 1
    taken = memory_on(MAC_64, found.target, found.head, found.config.changed(**changes), online=True)
    assert estimate.fits(taken, MAC_64.memory)
    with pytest.raises(ConfigError, match=f"would take .* 51.5 GB are free; with {re.escape(as_flags(changes))} it"):
        check_fits(MAC_64, found.target, found.head, found.config, online=True)


def test_the_least_change_comes_first(tmp_path: Path) -> None:
    """Fewer rows at once cost nothing, 16 bits a little, computing again time; a CPU is not told to use 16 bits."""
    found = planned(MAC_64, tmp_path, accumulate=1, grad_checkpoint=False, dtype="float32")

    def needed(machine: Machine, **changes: object) -> float:
        return memory_on(machine, found.target, found.head, found.config.changed(**changes), True).total / 0.95

    def change_on(machine: Machine) -> dict[str, object] | None:
        return fitting(machine, found.target, found.head, found.config, online=True)

    parts = Machine(int(needed(MAC_64, accumulate=8)) + 1, gpu=True)
    assert change_on(parts) == {"accumulate": 8}
    bits = Machine(int(needed(MAC_64, accumulate=8, dtype="bfloat16")) + 1, gpu=True)
    assert change_on(bits) == {"accumulate": 8, "dtype": "bfloat16"}
    again = {"accumulate": 8, "grad_checkpoint": True}
    assert change_on(Machine(int(needed(MAC_64, **again)) + 1, gpu=True)) == again
    assert change_on(Machine(int(0.9 * needed(MAC_64, **again)), gpu=True)) is None
    for memory in range(20, 200, 10):
        assert "dtype" not in (change_on(Machine(memory * 10**9, gpu=False)) or {})


@pytest.mark.parametrize(
    ("gigabytes", "remedy"),
    [(16, "a smaller or more strongly quantised --target"), (24, "a shorter --length, a smaller --unroll")],
)
def test_where_nothing_fits_it_says_what_would(gigabytes: int, remedy: str, tmp_path: Path) -> None:
    machine = replace(MAC_64, memory=int(0.75 * gigabytes * 2**30) if gigabytes < 24 else 24 * 10**9)
    found = planned(machine, tmp_path)
    assert changes_for(found) is None
    with pytest.raises(ConfigError, match=rf"would take .* free; use .*{re.escape(remedy)}"):
        check_fits(machine, found.target, found.head, found.config, online=True)


@pytest.mark.parametrize(("speed", "launch"), [(5e9, 1e-5), (50e9, 1e-5), (3e12, 3e-4), (27e12, 3e-4), (60e12, 3e-4)])
def test_the_speed_is_told_however_fast_the_machine_is(speed: float, launch: float) -> None:
    """From a CPU of 5 GFLOP/s to a GPU of 60 TFLOP/s which takes 0.3 ms to begin; a product of 1,024 takes it 0.04."""
    spent = 0.0

    def seconds(size: int) -> float:
        nonlocal spent
        took = launch + 2 * size**3 / speed
        spent += took
        return took

    assert work_per_second(mx.float32, seconds) == pytest.approx(speed, rel=0.02)
    assert spent < 2


def test_the_speed_of_this_machine_is_a_number() -> None:
    assert 1e8 < work_per_second() < 1e16


def test_settings_as_flags() -> None:
    assert as_flags({"accumulate": 8, "grad_checkpoint": True}) == "--accumulate 8 --grad-checkpoint"
    assert TrainConfig.of(accumulate=8, grad_checkpoint=True).optimization.accumulate == 8
