"""A run's memory: the minimum from shapes alone, then the measurement of a few steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import get_total_parameters

from eagle_mlx.catalog.models import described_target
from eagle_mlx.errors import ConfigError, OutputError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.memory import device_memory
from eagle_mlx.target import load_target
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.plan import memory
from eagle_mlx.train.plan.memory import PROGRAM, Bound, Probe, bound_of, check_memory, probe
from eagle_mlx.train.plan.recipe import load_recipe
from tests.fakes import EMBEDDED_TARGET, talking_target_folder, tiny_target, tiny_target_folder
from tests.full import in_full

CONFIG = TrainConfig.of(target="tiny", rows=2, length=32, unroll=2, draft_vocab=64, lanes=1)
INFO_64 = {"memory_size": 64 << 30, "max_recommended_working_set_size": 51_539_607_552}
"""On a Mac of 64 GB, as llama.cpp prints it: recommendedMaxWorkingSetSize = 51539.61 MB."""
MAC_64 = device_memory(INFO_64) or 0


def described(recipe: str, folder: Path, **changes: Any) -> Bound:
    loaded = load_recipe(recipe)
    config = TrainConfig.of(**{**loaded.settings, "output": str(folder / "out"), **changes})
    return bound_of(config, described_target(config.head.target, loaded.model))


def test_shapes_are_read_without_loading_a_weight() -> None:
    before = mx.get_active_memory()
    bound = bound_of(TrainConfig.of(target=str(EMBEDDED_TARGET), draft_vocab=3072))
    assert get_total_parameters(bound.target.model) == 6_298_816
    assert bound.head.token_ids is not None
    assert bound.head.token_ids.size == 3072
    assert bound.head.named_layers == (1, 6, 10)
    assert mx.get_active_memory() - before < 100_000


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_target_of_32_billion_parameters_fits_in_64_gb_but_not_in_16(tmp_path: Path) -> None:
    bound = described("qwen3-32b", tmp_path)
    assert 17e9 < bound.weights < 19e9, "4 bits and their scales"
    assert bound.training == 16 * bound.trained, "weights, gradients and two moments in float32"
    assert bound.memory == bound.weights + bound.training + PROGRAM
    bound.check(MAC_64)
    with pytest.raises(ConfigError, match=r"at least .* use a smaller or more strongly quantized --target"):
        bound.check(16 << 30)
    with pytest.raises(ConfigError, match=r"a smaller --intermediate-size or a smaller --draft-vocab"):
        bound.check(25 << 30)


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_of(CONFIG.changed(target=str(tiny_target_folder(tmp_path / "t")), output=str(tmp_path / "out")))
    bound.check()
    monkeypatch.setattr(memory, "free_disk", lambda folder: 1000)
    with pytest.raises(OutputError, match=r"out needs .* --checkpoints"):
        bound.check()


def test_a_linear_start_counts_if_it_takes_more_than_learning() -> None:
    target = tiny_target(hidden=256, vocab=64)
    small = CONFIG.changed(length=8, unroll=1)
    linear, at_random = bound_of(small, target).training, bound_of(small.changed(start="random"), target).training
    assert linear > at_random
    whole = bound_of(small.changed(init_from="head"), target)
    adapted = bound_of(small.changed(init_from="head", lora_rank=4), target)
    assert adapted.training < whole.training < linear
    assert adapted.trained < whole.trained / 4
    assert adapted.heads_on_disk > whole.heads_on_disk > 5 * adapted.checkpoints_on_disk


@pytest.mark.parametrize("head", in_full(list(KINDS), ["eagle3"]))
def test_a_probe_measures_and_leaves_no_trace(head: str) -> None:
    target = tiny_target()
    config = resolve(CONFIG.changed(head=head, **({} if head == "eagle3" else {"draft_vocab": 0})), target.hidden_size)
    existing = KINDS[head].new(target, config, np.arange(64) if head == "eagle3" else None, (0, 2, 3))
    before = {name: np.array(value) for name, value in weights_of(existing).items()}
    for measured in (probe(target, config), probe(target, config, existing)):
        assert measured.captured > 0
        assert measured.learned > 0
        assert measured.memory > 12 * sum(value.size for value in before.values()), "weights and two moments"
    for name, value in weights_of(existing).items():
        np.testing.assert_array_equal(value, before[name])


def test_more_rows_need_more_memory_and_more_parts_less() -> None:
    wide, config = tiny_target(vocab=2048), resolve(CONFIG.changed(length=128, unroll=4), 32)
    few, many, parts = (
        probe(wide, config.changed(**changes)).memory for changes in ({}, {"rows": 8}, {"rows": 8, "accumulate": 8})
    )
    assert few < many
    assert parts < 0.6 * many


def test_a_step_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(CONFIG.changed(rows=8), 32)
    check_memory(config, 1000, 100, 2000)
    with pytest.raises(ConfigError, match=r"use --accumulate 3 or --grad-checkpoint or a shorter --length"):
        check_memory(config, 1000, 100, 1400)
    with pytest.raises(ConfigError, match=r"use --grad-checkpoint or a shorter --length"):
        check_memory(config, 1000, 100, 1100)
    with pytest.raises(ConfigError, match="in addition to the target"):
        probe(tiny_target(), config, free=1000)


def test_the_time_of_a_run_follows_from_measured_speeds() -> None:
    measured = Probe(captured=1000, learned=100, memory=0)
    assert measured.seconds(1000, passes=2, online=False) == 21
    assert measured.seconds(1000, passes=2, online=True) == 22
    assert "100 tokens/s" in str(measured)
    assert "at 0 " not in str(dataclasses.replace(measured, learned=0.03))


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ([], "time"),
        (["--hours", "8"], "speed"),
        (["--minutes", "1"], "speed"),
    ],
)
def test_a_dry_run_measures_a_local_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], row: str
) -> None:
    target = talking_target_folder(tmp_path / "target")
    line = ["--target", str(target), "--output", str(tmp_path / "out"), "--head", "eagle", "--rows", "2"]
    assert main([*line, "--length", "32", "--dry-run", *more]) == 0
    plan = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "tokens/s" in plan[row]
    assert "at the peak of a step" in plan["memory"]
    assert plan["here"].startswith("fits, with ")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_dry_run_without_enough_memory_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**8)
    before = mx.get_active_memory()
    assert main(["--target", str(EMBEDDED_TARGET), "--dry-run"]) == 0
    assert "here        this run needs at least" in capsys.readouterr().out
    assert mx.get_active_memory() - before < 10**7
    assert load_target(EMBEDDED_TARGET, lazy=True).vocab_size == 4096
