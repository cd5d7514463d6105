from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from eagle_mlx.data_pipelines import capture
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.hidden_states import Example
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data.batches import Batches, Rows
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.step.inputs import make_plan
from eagle_mlx.train.step.optimizers import Optimizers, is_inner_matrix
from eagle_mlx.train.step.step import Stepper, part_arrays, part_loss
from tests.eagle_mlx.heads import ALL
from tests.fakes import tiny_head, tiny_target
from tests.full import FULL, in_full, some

PLAIN = {"feature_norm": "none", "recycle": "output"}
CONFIG = resolve(TrainConfig.of(target="tiny", rows=4, length=32, unroll=3, lr=3e-3, lanes=1, **PLAIN), 32)


def conversations(target: Target, count: int = 12) -> list[tuple[list[int], list[int]]]:
    """Return greedy continuations of random prompts: likely text that a head can learn."""
    rng = np.random.default_rng(0)
    rows = mx.array(rng.integers(0, target.vocab_size, (count, 4)), mx.int32)
    for _ in range(16):
        rows = mx.concatenate([rows, mx.argmax(target.forward(rows).logits[:, -1:], axis=-1).astype(mx.int32)], axis=1)
    return [(row, [0] * 4 + [1] * 16) for row in np.array(rows).tolist()]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def batch(target: Target, states: bool = True, aux: tuple[int, ...] = (0, 2, 3)) -> Rows:
    rendered = conversations(target)
    samples = (
        InMemory(list(capture(target, aux, rendered)))
        if states
        else InMemory([Example(np.array(t, np.int32), np.array(m, np.uint8)) for t, m in rendered])
    )
    return next(Batches(samples, 12, CONFIG.optimization.length, 0).epoch(0))


def new_head(target: Target, config: TrainConfig, kept: Any = None) -> Any:
    return KINDS["eagle3"].new(target, config, kept, (0, 2, 3))


def trained(target: Target, config: TrainConfig, rows: Rows, steps: int) -> tuple[list[float], dict[str, mx.array]]:
    head = new_head(target, config)
    stepper = Stepper(head, target, config)
    results = [stepper(rows, 1.0) for _ in range(steps)]
    return [result.loss for result in results if result is not None], weights_of(head)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls_on_few_samples(target: Target, optimizer: str) -> None:
    config = CONFIG.changed(optimizer=optimizer, lr=1e-2)
    head = new_head(target, config)
    stepper, rows = Stepper(head, target, config), batch(target)
    results = [result for result in (stepper(rows, 1.0) for _ in range(in_full(60, 40))) if result is not None]
    assert np.all(np.isfinite([result.loss for result in results]))
    assert results[-1].loss < results[0].loss - 1.0  # the rest is the target's own entropy
    assert min(results[-1].accuracy_by_step) > 0.45 > max(results[0].accuracy_by_step)


def test_streams_change_only_rounding(target: Target) -> None:
    rows = batch(target)
    losses, weights = trained(target, CONFIG, rows, 3)
    other_losses, other_weights = trained(target, CONFIG.changed(lanes=2), rows, 3)
    np.testing.assert_allclose(losses, other_losses, rtol=1e-4)
    for name, value in weights.items():
        np.testing.assert_allclose(value, other_weights[name], atol=2e-4, err_msg=name)


def test_states_captured_for_the_batch_are_as_good_as_kept_ones(target: Target) -> None:
    kept, _ = trained(target, CONFIG, batch(target), 3)
    anew, _ = trained(target, CONFIG, batch(target, states=False), 3)
    np.testing.assert_allclose(kept, anew, rtol=2e-3)


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(
    mx.default_device() == mx.cpu and not (FULL and shutil.which("g++")),
    reason="MLX compiles for the CPU with g++, in half a minute; only in full",
)
def test_a_compiled_step_is_the_same_step(target: Target) -> None:
    config, rows = CONFIG.changed(unroll=1), batch(target)

    def losses(compiled: bool) -> list[float]:
        head = new_head(target, config)
        stepper = Stepper(head, target, config)
        if compiled:
            stepper.compile()
        return [result.loss for result in (stepper(rows, factor) for factor in (0.5, 1.0, 1.0)) if result]

    np.testing.assert_allclose(losses(True), losses(False), rtol=1e-4)


@pytest.mark.parametrize("draft_vocab", [None, 48])
def test_the_gradient_is_finite_and_points_downhill(target: Target, draft_vocab: int | None) -> None:
    head = tiny_head(target, draft_vocab=draft_vocab)
    head.attach(target)
    rows = batch(target, aux=head.config.aux_layers)
    plan = make_plan(rows, 3)
    arrays = part_arrays(head, target, rows, plan, np.full(3, 1 / 100, np.float32))

    def loss() -> mx.array:
        return part_loss(head, target, arrays)[0]

    before, gradient = nn.value_and_grad(head, loss)()
    flat: dict[str, mx.array] = dict(tree_flatten(gradient))
    weights = weights_of(head)
    assert flat.keys() == weights.keys()
    assert all(np.all(np.isfinite(np.array(g))) for g in flat.values())
    norm = float(sum(np.square(np.array(g)).sum() for g in flat.values()))
    assert norm > 0
    head.load_weights([(name, weights[name] - 1e-3 / norm * g) for name, g in flat.items()])
    assert float(np.array(loss())) == pytest.approx(float(np.array(before)) - 1e-3, abs=3e-4)


def test_a_batch_without_answers_is_skipped(target: Target) -> None:
    rows = batch(target)
    silent = Rows(rows.tokens, np.zeros_like(rows.loss_mask), rows.segments, rows.states)
    head = new_head(target, CONFIG)
    assert Stepper(head, target, CONFIG)(silent, 1.0) is None


def test_prompts_carry_no_loss(target: Target) -> None:
    rows = batch(target)
    result = Stepper(tiny_head(target), target, CONFIG)(rows, 0.0)
    assert result is not None
    assert result.loss_tokens == 12 * 16
    assert result.tokens == 12 * 20
    assert result.loss == pytest.approx(np.average(result.loss_by_step, weights=[1, 0.8, 0.64]), rel=1e-4)
    assert all(0 <= share <= 1 for share in result.accuracy_by_step)


def test_a_new_head_starts_with_the_targets_weights(target: Target) -> None:
    kept = np.sort(np.random.default_rng(0).choice(target.vocab_size, 48, replace=False)).astype(np.int64)
    head = new_head(target, CONFIG, kept)
    hidden = mx.array(np.random.default_rng(1).normal(size=(5, 32)), mx.float32)
    np.testing.assert_allclose(
        head.logits(hidden), np.array(target.lm_head(target.norm(hidden)))[:, kept], rtol=1e-3, atol=1e-3
    )
    config = head.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.intermediate_size, config.rope_theta) == (64, 10000.0)
    np.testing.assert_array_equal(head.token_ids, kept)


def test_muon_is_for_the_inner_matrices(target: Target) -> None:
    inner = {name for name, value in weights_of(tiny_head(target)).items() if is_inner_matrix(name, value)}
    assert inner == {
        "fc.weight",
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("name", ["dspark", "dspark, rnn", "dspark, no markov", "dflash", "dflash2", "peagle"])
def test_muon_is_not_for_embeddings_and_output_layers(name: str) -> None:
    target = tiny_target(vocab=61)
    head = ALL[name](target)
    rows = {value.shape[0] for weight, value in weights_of(head).items() if is_inner_matrix(weight, value)}
    assert rows
    assert not {1, target.vocab_size, head.config.draft_vocab_size} & rows


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (32, 32)])
def test_steps_of_muon_are_as_large_as_those_of_adamw(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    gradient = {"fc": {"weight": mx.array(rng.normal(size=shape), mx.float32)}}
    start = {"fc": {"weight": mx.zeros(shape)}}

    def first_step(**settings: Any) -> float:
        optimizers = Optimizers(TrainConfig.of(lr=1e-3, **settings).optimization, start)
        moved = optimizers.together.apply_gradients(gradient, start)["fc"]["weight"]
        return float(mx.sqrt(mx.mean(moved * moved)).item())

    # An orthogonal matrix [A, B] has a mean square of 1 / max(A, B); five Newton-Schulz steps come close to one.
    assert first_step(optimizer="muon") == pytest.approx(0.2e-3, rel=0.25)
    assert first_step(optimizer="muon", muon_lr=0.02) == pytest.approx(
        0.02 * max(1, shape[0] / shape[1]) ** 0.5 / max(shape) ** 0.5, rel=0.25
    )


def test_layers_that_the_target_lacks(target: Target) -> None:
    with pytest.raises(Exception, match="the target has layers 0 to 3"):
        KINDS["eagle3"].check(target, TrainConfig.of(aux_layers=(0, 4)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("as_compiled", in_full([False, True], [False]))
def test_a_restored_stepper_continues_bit_for_bit(
    target: Target, tmp_path: Path, optimizer: str, as_compiled: bool
) -> None:
    config = CONFIG.changed(optimizer=optimizer, feature_noise=0.1, weight_decay=0.01)
    rows = batch(target)

    def begun(seed: int) -> Stepper:
        stepper = Stepper(new_head(target, config.changed(seed=seed)), target, config)
        if as_compiled:
            stepper.compile()
        return stepper

    whole, files = begun(0), [str(tmp_path / name) for name in ("head.safetensors", "state.safetensors")]
    for step in range(3):
        whole(rows, 1 - 0.1 * step)
    mx.save_safetensors(files[0], weights_of(whole.head))
    mx.save_safetensors(files[1], whole.state())
    resumed = begun(1)
    resumed(rows, 0.5)  # its earlier state must not matter
    resumed.head.load_weights(files[0])
    resumed.restore(mx.load(files[1]))
    for _ in range(2):
        assert whole(rows, 0.6) == resumed(rows, 0.6)
    assert all(mx.array_equal(value, weights_of(resumed.head)[name]) for name, value in weights_of(whole.head).items())
    assert all(mx.array_equal(value, resumed.state()[name]) for name, value in whole.state().items())


@settings(max_examples=some(8), deadline=None)
@given(st.lists(st.integers(3, 20), min_size=2, max_size=8), st.integers(0, 9))
def test_packing_changes_no_loss(target: Target, lengths: list[int], seed: int) -> None:
    """Every conversation has the same loss as alone, whatever shares its row, because it cannot see the others."""
    rng = np.random.default_rng(seed)
    rendered = [(rng.integers(0, target.vocab_size, n).tolist(), [0] + [1] * (n - 1)) for n in lengths]
    samples, head = list(capture(target, (0, 2, 3), rendered)), tiny_head(target)
    head.attach(target)

    def total(held: list[Example]) -> float:
        (rows,) = Batches(InMemory(held), len(lengths), 24, seed).epoch(0)
        arrays = part_arrays(head, target, rows, make_plan(rows, 3), np.ones(3, np.float32))
        return float(np.array(part_loss(head, target, arrays)[0]))

    assert total(samples) == pytest.approx(sum(total([sample]) for sample in samples), rel=1e-4)
