"""The flag for CPU shortcuts: who reads it, and what it switches."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx import cpu
from eagle_mlx.cpu import compute_dtype, default_streams, log_sum_exp, softmax, use_shortcuts
from tests.shortcuts import without_shortcuts

on_a_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU has no shortcuts")
REPORT = "from eagle_mlx.cpu import use_shortcuts; print(use_shortcuts())"


def run(setting: str | None) -> subprocess.CompletedProcess[str]:
    """Print whether a new process uses shortcuts."""
    environment = {name: value for name, value in os.environ.items() if name != "EAGLE_MLX_CPU_SHORTCUTS"}
    if setting is not None:
        environment["EAGLE_MLX_CPU_SHORTCUTS"] = setting
    return subprocess.run(
        [sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@on_a_cpu
@pytest.mark.parametrize(("setting", "expected"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_the_environment_switches_shortcuts_off(
    setting: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module reads the environment when it is imported."""
    if setting is None:
        monkeypatch.delenv(cpu.ENVIRONMENT, raising=False)
    else:
        monkeypatch.setenv(cpu.ENVIRONMENT, setting)
    assert runpy.run_path(cpu.__file__)["use_shortcuts"]() == expected


@on_a_cpu
def test_a_process_uses_no_shortcuts_if_they_are_switched_off() -> None:
    assert run("0").stdout.strip() == "False"


def test_an_invalid_setting_is_refused_with_its_name() -> None:
    done = run("off")
    assert done.returncode != 0
    assert "EAGLE_MLX_CPU_SHORTCUTS is 'off'" in done.stderr


def test_without_shortcuts_holds_for_all_threads_and_ends_with_its_block() -> None:
    before, seen = use_shortcuts(), list[bool]()
    with without_shortcuts():
        with without_shortcuts():
            pass
        thread = Thread(target=lambda: seen.append(use_shortcuts()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert use_shortcuts() == before


def test_without_shortcuts_there_is_one_stream_and_no_own_dtype() -> None:
    with without_shortcuts():
        assert default_streams() == 1
        assert compute_dtype() is None


@pytest.mark.parametrize("compute", [softmax, log_sum_exp])
def test_both_ways_compute_the_same(compute: Callable[[mx.array], mx.array]) -> None:
    x = 4 * mx.random.normal((5, 33), key=mx.random.key(0))
    with without_shortcuts():
        wanted = np.array(compute(x))
    np.testing.assert_allclose(np.array(compute(x)), wanted, rtol=2e-5, atol=1e-6)
