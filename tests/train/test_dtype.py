"""Forward and backward passes in 16 bits with weights and moments in float32."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.formats.tensors import read_tensors, weights_of
from eagle_mlx.hidden_states import rounded
from eagle_mlx.target import Target
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig, file_type, pass_type
from eagle_mlx.train.data.batches import Rows
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.run import state
from eagle_mlx.train.step.inputs import make_plan
from eagle_mlx.train.step.step import Stepper, in_pass_type, objective_of, part_arrays, part_loss
from tests.fakes import tiny_target
from tests.full import diagonal, in_full

CONFIG = TrainConfig.of(target="tiny", rows=4, length=24, unroll=3, lr=3e-3, lanes=1)


@pytest.fixture(scope="module")
def target_in_memory() -> Target:
    return tiny_target(vocab=128)


def random_rows(target: Target, layers: int) -> Rows:
    rng = np.random.default_rng(0)
    shape = (4, 24)
    tokens = rng.integers(0, target.vocab_size, shape).astype(np.int32)
    states = rounded(rng.normal(size=(*shape, layers * target.hidden_size)).astype(np.float32))
    return Rows(tokens, np.ones(shape, np.uint8), np.ones(shape, np.int32), states)


def begun(target: Target, kind: str, **changes: Any) -> tuple[TrainConfig, Any, Rows]:
    config = resolve(CONFIG.changed(head=kind, **changes), target.hidden_size)
    layers = KINDS[kind].aux_layers(target, config)
    head: Any = KINDS[kind].new(target, config, None, layers)
    head.attach(target)
    return config, head, random_rows(target, len(layers) + 1)


@pytest.mark.parametrize(("kind", "again"), diagonal(KINDS, [False, True]))
def test_gradients_equal_those_of_float32_except_for_rounding(target_in_memory: Target, kind: str, again: bool) -> None:
    target = target_in_memory
    config, head, rows = begun(target, kind, grad_checkpoint=again)
    arrays = part_arrays(head, target, rows, make_plan(rows, 3), np.full(3, 1 / 50, np.float32))

    def found(dtype: mx.Dtype) -> tuple[mx.array, dict[str, mx.array]]:
        loss = nn.value_and_grad(head, lambda: part_loss(head, target, arrays, objective_of(config), again, dtype)[0])
        value, gradient = loss()
        return value, dict(tree_flatten(gradient))

    (loss, exact), (rounded_loss, rounded) = found(mx.float32), found(mx.bfloat16)
    assert rounded_loss.dtype == mx.float32
    assert rounded_loss.item() != loss.item(), "something must have been computed in 16 bits"
    assert rounded_loss.item() == pytest.approx(loss.item(), rel=1e-2)
    for name, value in exact.items():
        assert rounded[name].dtype == mx.float32, name
        off = float(mx.sqrt(mx.sum(mx.square(rounded[name] - value))))
        assert off <= 0.05 * float(mx.sqrt(mx.sum(mx.square(value)))) + 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_moments_stay_in_float32(target_in_memory: Target, kind: str) -> None:
    """Steps far below the resolution of 16 bits still add up."""
    target = target_in_memory
    config, head, rows = begun(target, kind, dtype="bfloat16", lr=1e-6, weight_decay=0.0)
    before = {name: mx.array(value) for name, value in weights_of(head).items()}
    stepper = Stepper(head, target, config)
    for _ in range(3):
        stepper(rows, 1.0)
    for name, value in weights_of(head).items():
        assert value.dtype == mx.float32, name
    floats = [x.dtype for x in stepper.state().values() if mx.issubdtype(x.dtype, mx.floating)]
    assert floats
    assert set(floats) == {mx.float32}
    norm = next(name for name in before if name.endswith("norm.weight"))
    moved = mx.abs(weights_of(head)[norm] - before[norm])
    assert 0 < float(mx.max(moved)) < 2**-9, "less than half of what bfloat16 tells apart at 1"


def test_the_passes_see_rounded_weights_and_the_head_keeps_its_own(target_in_memory: Target) -> None:
    _, head, _ = begun(target_in_memory, "eagle3")
    before = weights_of(head)
    with in_pass_type(head, mx.bfloat16):
        assert {x.dtype for x in weights_of(head).values()} == {mx.bfloat16}
    assert all(value is before[name] for name, value in weights_of(head).items())


def test_the_default_dtype_depends_on_the_device() -> None:
    assert pass_type(CONFIG, mx.Device(mx.cpu)) == mx.float32
    assert pass_type(CONFIG, mx.Device(mx.gpu)) == mx.bfloat16
    for name, dtype in (("float32", mx.float32), ("bfloat16", mx.bfloat16)):
        config = CONFIG.changed(dtype=name)
        assert (
            pass_type(config, mx.Device(mx.gpu)) == pass_type(config, mx.Device(mx.cpu)) == file_type(config) == dtype
        )
    assert file_type(CONFIG) == mx.bfloat16


def flags(target: Path, chats: Path, output: Path, dtype: str) -> list[str]:
    small = "--length 64 --max-length 64 --rows 2 --unroll 2 --draft-vocab 256 --max-steps 4 --eval-steps 2 --lr 1e-3"
    few = "--eval-prompts 2 --eval-tokens 6 --eval-depth 2"
    names = ["--target", str(target), "--data", str(chats), "--output", str(output), "--dtype", dtype]
    return [*names, *small.split(), *few.split()]


@pytest.mark.parametrize("dtype", in_full(["float32", "bfloat16"], ["float32"]))
def test_the_head_is_written_in_the_type_that_its_config_states(
    dtype: str, target: Path, chats: Path, tmp_path: Path
) -> None:
    assert main(flags(target, chats, tmp_path / "out", dtype)) == 0
    for name in ("best", "last"):
        folder = tmp_path / "out" / name
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
        floats = {str(x.dtype) for x in read_tensors(folder).values() if mx.issubdtype(x.dtype, mx.floating)}
        assert floats == {f"mlx.core.{dtype}"}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["config"]["dtype"], report["machine"]["dtype"]) == (dtype, dtype)


def test_a_resumed_run_in_16_bits_is_the_run_that_was_never_stopped(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(target, chats, tmp_path / "whole", "bfloat16")) == 0
    looked = 0

    def stop(self: Stop) -> None:
        nonlocal looked
        looked += 1
        if looked == 5:  # before the third step
            raise Stopped(signal.SIGTERM)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "check", stop)
        assert main(flags(target, chats, out, "bfloat16")) == 143
    saved = state.newest(out, print)
    assert saved is not None
    assert {x.dtype for x in saved.head.values()} == {mx.float32}
    assert main(["--resume", str(out), "--dtype", "float32"]) == 2
    assert "leave --dtype out" in capsys.readouterr().err
    assert main(["--resume", str(out)]) == 0
    resumed, unbroken = ((run / "last" / "model.safetensors").read_bytes() for run in (out, tmp_path / "whole"))
    assert resumed == unbroken
