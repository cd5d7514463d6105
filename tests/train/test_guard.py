"""A loss or gradient that is not finite changes nothing, and its cause is reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten

from eagle_mlx.data_pipelines import ShardCapture
from eagle_mlx.hidden_states import Example, HiddenStates, rounded
from eagle_mlx.target import load_target
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data.batches import Batches
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.step.step import NotFiniteError, Stepper
from tests.fakes import tiny_target, tiny_target_folder

CONFIG = resolve(TrainConfig.of(rows=3, length=16, unroll=2, lr=1e-3, draft_vocab=64), 32)

NAN = np.uint16(0x7FC0)
"""The bits of bfloat16's NaN."""


def samples(bad: int | None) -> InMemory:
    rng = np.random.default_rng(0)

    def one(index: int) -> Example:
        states = rounded(rng.standard_normal((16, 4, 32)).astype(np.float32))
        if index == bad:
            states[5, 1, 3] = NAN
        tokens, mask = rng.integers(0, 128, 16).astype(np.int32), np.ones(16, np.uint8)
        return Example(tokens, mask, HiddenStates((0, 1, 2), states[:, :3].reshape(16, 96), states[:, 3]))

    return InMemory([one(index) for index in range(6)])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_changes_if_a_loss_is_not_finite(accumulate: int, optimizer: str) -> None:
    target = tiny_target()
    config = CONFIG.changed(accumulate=accumulate, optimizer=optimizer)
    head = KINDS["eagle3"].new(target, config, np.arange(0, 128, 2), (0, 1, 2))
    stepper = Stepper(head, target, config)
    batches = Batches(samples(bad=4), config.optimization.rows, config.optimization.length, seed=0)
    good, bad = sorted(batches.epoch(0), key=lambda rows: (4,) in rows.samples)
    assert stepper(good, 1.0) is not None

    def state() -> dict[str, Any]:
        arrays = dict(tree_flatten(head.trainable_parameters())) | stepper.state()
        return {name: np.array(array) for name, array in arrays.items()}

    before = state()
    with pytest.raises(NotFiniteError, match="the loss is nan"):
        stepper(bad, 1.0)
    after = state()
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert stepper(good, 1.0) is not None, "it could continue"


def test_the_command_says_where_to_look(tmp_path: Path, capsys: Any) -> None:
    folder = tiny_target_folder(tmp_path / "tiny")
    target = load_target(str(folder))
    rows = [(list(range(i, 20 + i)), [0] * 5 + [1] * 15) for i in range(8)]
    out = tmp_path / "shards"
    ShardCapture(target, (0, 2), rows).write(out)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"add {i}", "completion": "x"}) + "\n" for i in range(60)))
    from eagle_mlx.train.data import sources as data

    real = data.ShardReader.__getitem__

    def spoilt(self: Any, index: int) -> Example:
        sample = real(self, index)
        nan = dataclasses.replace(sample.states, last=sample.states.last | NAN)
        return dataclasses.replace(sample, states=nan) if index == 5 else sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.ShardReader, "__getitem__", spoilt)
        flags = ("--rows", "2", "--length", "20", "--unroll", "2", "--epochs", "1", "--eval-tokens", "4")
        more = ("--eval-prompts", "1", "--eval-depth", "2", "--data", str(chats), "--output", str(tmp_path / "run"))
        assert main(["--target", str(folder), "--shards", str(out), *flags, *more]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "the loss is nan" in printed
    assert "at step" in printed
    assert f"row 5 of {out}/shard-00000" in printed
    assert "the weights are unchanged" in printed
