"""Less memory for the same step: parts of a batch in sequence, and recomputation in place of storage."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data.batches import Rows
from eagle_mlx.train.kinds import KINDS, Head, resolve
from eagle_mlx.train.step.inputs import make_anchor_plan, make_plan
from eagle_mlx.train.step.losses import LOSSES, ChunkedLoss, soft_labels, step_loss
from eagle_mlx.train.step.step import Stepper, StepResult, objective_of, part_arrays, part_loss
from eagle_mlx.train.unroll import recomputed
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal

HEADS = ("eagle3", "eagle", "mtp", "peagle")
CONFIG = TrainConfig.of(target="tiny", rows=8, length=32, unroll=3, lr=3e-3, lanes=1)
VOCAB = 128


def random_rows(count: int, length: int, seed: int = 0) -> Rows:
    """Return rows of two conversations; the second is shorter in every other row."""
    rng = np.random.default_rng(seed)
    segments = np.repeat([[1, 2]], length // 2, axis=1).repeat(count, axis=0).astype(np.int32)
    segments[::2, -4:] = 0
    tokens = rng.integers(0, VOCAB, (count, length)).astype(np.int32) * (segments > 0)
    return Rows(tokens.astype(np.int32), (segments > 0).astype(np.uint8), segments, None)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab=VOCAB)


def new(target: Target, config: TrainConfig) -> Head:
    return KINDS[config.head.kind].new(target, config, None, (0, 2, 3))


def stepper_of(target: Target, config: TrainConfig) -> Stepper:
    settings = resolve(config, target.hidden_size)
    return Stepper(new(target, settings), target, settings)


def after(target: Target, config: TrainConfig, rows: Rows, steps: int = 3) -> tuple[list[StepResult], dict[str, Any]]:
    stepper = stepper_of(target, config)
    results = [stepper(rows, 1.0) for _ in range(steps)]
    return [result for result in results if result is not None], weights_of(stepper.head)


def assert_same(
    first: tuple[list[StepResult], dict[str, Any]], second: tuple[list[StepResult], dict[str, Any]]
) -> None:
    for a, b in zip(first[0], second[0], strict=True):
        assert (a.tokens, a.loss_tokens) == (b.tokens, b.loss_tokens)
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
        assert a.loss_by_step == pytest.approx(b.loss_by_step, rel=1e-4)
        assert a.accuracy_by_step == pytest.approx(b.accuracy_by_step, abs=1e-6)
    for name, value in first[1].items():
        np.testing.assert_allclose(value, second[1][name], atol=5e-4, err_msg=name)


@pytest.mark.parametrize(
    ("head", "changes"),
    diagonal(HEADS, [{"accumulate": 3}, {"grad_checkpoint": True}, {"accumulate": 2, "lanes": 2}]),
)
def test_the_step_is_the_same(target: Target, head: str, changes: dict[str, Any]) -> None:
    config = CONFIG.changed(head=head)
    rows = random_rows(8, 32)
    assert_same(after(target, config, rows), after(target, config.changed(**changes), rows))


def test_a_compiled_step_is_the_same(target: Target) -> None:
    """Compiled only in full, because there are 26 kernels."""
    plain, rows = CONFIG.changed(unroll=2), random_rows(4, 16)
    config = plain.changed(accumulate=2, grad_checkpoint=True)
    stepper = stepper_of(target, config)
    stepper.compile()
    results = [result for result in (stepper(rows, 1.0) for _ in range(2)) if result is not None]
    assert_same(after(target, plain, rows, steps=2), (results, weights_of(stepper.head)))


def test_more_parts_than_rows_and_parts_without_loss(target: Target) -> None:
    rows = random_rows(4, 32)
    rows.loss_mask[1:3] = 0
    whole = after(target, CONFIG, rows)
    assert_same(whole, after(target, CONFIG.changed(accumulate=16), rows))


@pytest.mark.parametrize(("head", "loss"), diagonal(HEADS, [*LOSSES]))
def test_gradients_agree(target: Target, head: str, loss: str) -> None:
    config = resolve(CONFIG.changed(head=head, loss=loss), target.hidden_size)
    trained, rows = new(target, config), random_rows(3, 24)
    trained.attach(target)
    kind = KINDS[head]
    plan = make_anchor_plan(rows, 3, 0, 0, share=kind.share) if kind.in_blocks else make_plan(rows, 3)
    arrays = part_arrays(trained, target, rows, plan, np.full(3, 1 / 50, np.float32))

    def gradient(chunked: bool) -> dict[str, mx.array]:
        gradients = nn.value_and_grad(
            trained, lambda: part_loss(trained, target, arrays, objective_of(config), chunked)[0]
        )
        return dict(tree_flatten(gradients()[1]))

    plain, chunked = gradient(False), gradient(True)
    assert plain.keys() == chunked.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(value, chunked[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("logits", [1, 5 * VOCAB, 1 << 20])
def test_the_chunked_loss_in_parts_of_any_size(target: Target, logits: int) -> None:
    head, rng = tiny_head(target, draft_vocab=48), np.random.default_rng(0)
    outputs = [mx.array(rng.normal(size=(2, 9, 32)), mx.float32) for _ in range(3)]
    last = mx.array(rng.normal(size=(13, 32)), mx.float32)
    select = mx.array(rng.integers(0, 18, (3, 13)), mx.int32)
    weights = mx.array(rng.uniform(size=(3, 13)), mx.float32)

    def plain(outputs: list[mx.array]) -> tuple[mx.array, mx.array, mx.array]:
        """Compute all labels of a step at once, with MLX's own gradient."""
        labels = soft_labels(target, last, head.token_ids)
        read = [h.reshape(-1, 32)[select[step]] for step, h in enumerate(outputs)]
        losses = [step_loss(head, x, labels, weights[step]) for step, x in enumerate(read)]
        by_step, hits = map(mx.stack, zip(*losses, strict=True))
        return mx.sum(by_step), by_step, hits

    chunked = ChunkedLoss(head, target, last, weights, logits=logits)
    for ours, theirs in zip(chunked(outputs, select), plain(outputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for ours, theirs in zip(
        mx.grad(lambda xs: 2 * chunked(xs, select)[0])(outputs),
        mx.grad(lambda xs: plain(xs)[0])(outputs),
        strict=True,
    ):
        np.testing.assert_allclose(ours, 2 * theirs, rtol=1e-3, atol=1e-6)


def test_a_recomputed_step_leaves_the_module_as_it_was() -> None:
    layer = nn.Linear(4, 4)
    before, x = layer.weight, mx.ones((2, 4))
    step = recomputed(layer, lambda x: [mx.tanh(layer(x)), x], without=("bias",))
    value, gradient = nn.value_and_grad(layer, lambda: mx.sum(step(x)[0]))()
    mx.eval(value, gradient)
    assert np.array_equal(layer.weight, before)
    assert np.abs(np.array(gradient["weight"])).sum() > 0
    assert np.all(np.array(gradient["bias"]) == 0), "what is left out counts as constant"


def peak(target: Target, config: TrainConfig, rows: Rows) -> int:
    """Return the memory that a step adds."""
    stepper = stepper_of(target, config)
    stepper(rows, 1.0)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    stepper(rows, 1.0)
    return mx.get_peak_memory() - before


def test_the_peak_is_lower(target: Target) -> None:
    """The bounds allow for MLX's early allocations: the measured values are 26%, 33% and 68%.

    The vocabulary is small, so there is nothing to gain on logits, which are never kept.
    """
    rows, config = random_rows(8, 64), CONFIG.changed(unroll=7, length=64, intermediate_size=256)
    whole = peak(target, config, rows)
    assert peak(target, config.changed(accumulate=4), rows) < 0.6 * whole
    assert peak(target, config.changed(grad_checkpoint=True), rows) < 0.6 * whole
    assert peak(target, config.changed(dtype="bfloat16"), rows) < 0.85 * whole


def test_no_logits_are_kept(target: Target) -> None:
    """Seven draft steps over 496 labels of 2,048 tokens: 87 MB with the logits of all steps, now 56."""
    wide = tiny_target(vocab=2048)
    assert peak(wide, CONFIG.changed(unroll=7, length=64), random_rows(8, 64)) < 65e6


def test_the_peak_does_not_grow_with_the_draft_steps(target: Target) -> None:
    wide, rows = tiny_target(vocab=2048), random_rows(8, 64)
    config = CONFIG.changed(length=64, grad_checkpoint=True)
    few, many = (peak(wide, config.changed(unroll=steps), rows) for steps in (2, 8))
    assert many < 1.6 * few
