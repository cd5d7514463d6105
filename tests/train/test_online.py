"""A head learns from examples, one step at a time, as a whole run would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_mlx.data_pipelines import capture
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import load_head
from eagle_mlx.target import Target
from eagle_mlx.train import ROWS, OnlineTrainer
from tests.eagle_mlx.heads import ALL, dspark
from tests.fakes import tiny_target
from tests.full import in_full
from tests.train.test_step import conversations

KINDS = in_full(sorted(ALL), ["eagle", "eagle3.1", "mtp", "peagle, 3.1", "dflash, windows", "dflash2", "dspark, rnn"])
STEPS = in_full(40, 16)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_and_keeps_its_shape(kind: str, target: Target, tmp_path: Path) -> None:
    head = ALL[kind](target)
    config = head.config
    head.attach(target)
    examples = list(capture(target, head.named_layers, conversations(target)))
    trainer, rng = OnlineTrainer(head, target), np.random.default_rng(0)
    losses = [trainer.step([examples[i] for i in rng.permutation(len(examples))[:ROWS]]) for _ in range(STEPS)]
    measured = [loss for loss in losses if loss is not None]
    assert len(measured) == trainer.steps > 0
    assert np.mean(measured[-8:]) < np.mean(measured[:8])
    trainer.save(tmp_path / "head", {"from": "traffic"})
    saved = load_head(tmp_path / "head", target)
    assert type(saved) is type(head)
    assert saved.config == config


def test_a_trained_head_takes_a_third_of_a_new_ones_steps(target: Target) -> None:
    """Larger ones made the included head forget three times as much of other texts, and gained no more."""
    moved = []
    for is_new in (False, True):
        head = ALL["eagle3.1"](target)
        before = head.midlayer.mlp.down_proj.weight
        head.attach(target)
        examples = list(capture(target, head.named_layers, conversations(target)))
        OnlineTrainer(head, target, is_new=is_new).step(examples[:ROWS])
        moved.append(float(abs(head.midlayer.mlp.down_proj.weight - before).mean()))
    assert moved[1] == pytest.approx(3 * moved[0], rel=0.01)


@pytest.mark.parametrize("is_new", [False, True])
def test_the_mean_of_the_serving_and_the_learned_weights_is_saved(is_new: bool, target: Target, tmp_path: Path) -> None:
    """After it took over, it is what serves. A new head has nothing to forget."""
    head = ALL["eagle3.1"](target)
    head.attach(target)
    serving = np.array(head.fc.weight)
    examples = list(capture(target, head.named_layers, conversations(target)))
    trainer = OnlineTrainer(head, target, is_new=is_new)
    for _ in range(2):
        trainer.step(examples[:ROWS], 500.0)
        trainer.save(tmp_path / "head", {})
        saved, learned = np.array(load_head(tmp_path / "head", target).fc.weight), np.array(head.fc.weight)
        assert abs(learned - serving).mean() > 0.01
        np.testing.assert_allclose(saved, learned if is_new else (serving + learned) / 2, rtol=0.01, atol=1e-3)
        trainer.took_over()
        serving = saved


def test_a_head_that_cannot_be_trained_is_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match="the serving head .* cannot be trained"):
        OnlineTrainer(dspark(target, markov_head="rnn", first_slot_drafts=False), target)
