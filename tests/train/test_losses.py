from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.target import Target
from eagle_mlx.train.kinds.base import projection
from eagle_mlx.train.step.losses import LOSSES, ChunkedLoss, Labels, soft_cross_entropy, soft_labels, step_weights
from tests.architectures import SCALED, tiny_model
from tests.fakes import randomize, tiny_head, tiny_target


def test_step_weights_fall_and_sum_to_one() -> None:
    weights = step_weights(4, 0.5)
    assert sum(weights) == pytest.approx(1.0)
    assert [weights[i + 1] / weights[i] for i in range(3)] == pytest.approx([0.5] * 3)
    assert step_weights(3, 1.0) == pytest.approx([1 / 3] * 3)
    assert step_weights(3, 0.0) == [1.0, 0.0, 0.0]


def test_labels_over_the_whole_vocabulary_are_the_targets_distribution() -> None:
    target = tiny_target()
    tokens = mx.array([[3, 1, 4, 1, 5]])
    forward = target.forward(tokens, aux_layers=(target.num_layers - 1,))
    labels = soft_labels(target, forward.aux[0][0], None)
    np.testing.assert_allclose(labels.probs, mx.softmax(forward.logits[0], axis=-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(labels.best, mx.argmax(forward.logits[0], axis=-1))
    assert np.all(np.array(labels.inside) == 1)


@pytest.mark.parametrize("name", SCALED)
def test_labels_are_the_distribution_of_a_target_that_scales_its_logits(name: str) -> None:
    model = tiny_model(name, **SCALED[name])
    randomize(model, 0, 0.2)
    target, tokens = Target(model), mx.array([[3, 1, 4, 1, 5]])
    wanted, hidden = model(tokens)[0], target.forward(tokens).hidden
    assert hidden is not None
    labels = soft_labels(target, hidden[0], None)
    np.testing.assert_allclose(labels.probs, mx.softmax(wanted, axis=-1), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(labels.best, mx.argmax(wanted, axis=-1))


@pytest.mark.parametrize("name", ["cohere", "granite", "minicpm"])
def test_a_new_heads_projection_starts_with_the_targets_scale(name: str) -> None:
    model = tiny_model(name, **SCALED[name])
    randomize(model, 0, 0.2)
    target, h = Target(model), mx.random.normal((5, 32), key=mx.random.key(0))
    np.testing.assert_allclose(h @ projection(target).T, target.logits(h), rtol=1e-4, atol=1e-4)


def test_labels_over_a_draft_vocabulary() -> None:
    target = tiny_target()
    head = tiny_head(target, draft_vocab=48)
    assert head.token_ids is not None
    kept = np.array(head.token_ids)
    hidden = mx.array(np.random.default_rng(0).normal(size=(40, 32)), mx.float32)
    logits = np.array(target.lm_head(target.norm(hidden)))
    labels = soft_labels(target, hidden, head.token_ids)
    assert labels.probs.shape == (40, 48)
    np.testing.assert_allclose(labels.probs, mx.softmax(mx.array(logits[:, kept]), axis=-1), rtol=1e-4, atol=1e-6)
    best = logits.argmax(axis=-1)
    inside = np.isin(best, kept)
    assert 0 < inside.sum() < 40
    np.testing.assert_array_equal(np.array(labels.inside) == 1, inside)
    np.testing.assert_array_equal(kept[np.array(labels.best)][inside], best[inside])


def in_numpy(loss: str, logits: Any, probs: Any, frozen: Any) -> Any:
    """Return a loss [U] as its source defines it, in float64. LK's shares are those of the logits `frozen`."""
    log_q, log_frozen = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, frozen))
    accepted, accepted_before = (np.minimum(probs, np.exp(x)).sum(-1) for x in (log_q, log_frozen))
    share = np.exp(-3 * accepted_before)
    soft = -(probs * log_q).sum(-1)
    hard = -np.take_along_axis(log_q, probs.argmax(-1)[:, None], -1)[:, 0]
    return {"soft": soft, "hard": hard, "tv": 1 - accepted, "lk": share * soft + (1 - share) * (1 - accepted)}[loss]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_gradients(loss: str) -> None:
    rng = np.random.default_rng(0)
    z, p = rng.normal(0, 2, (6, 20)), rng.dirichlet(np.full(20, 0.3), 6)
    z[:2] += 3 * np.log(p[:2] + 1e-3)  # two good drafts
    logits, probs = mx.array(z, mx.float32), mx.array(p, mx.float32)
    labels = Labels(probs, mx.argmax(probs, axis=-1), mx.ones(6))
    np.testing.assert_allclose(LOSSES[loss](logits, labels), in_numpy(loss, z, p, z), rtol=1e-4, atol=1e-6)
    gradient = np.array(mx.grad(lambda x: mx.sum(LOSSES[loss](x, labels)))(logits))
    for token in range(20):
        moved = 1e-6 * (np.arange(20) == token)
        wanted = (in_numpy(loss, z + moved, p, z) - in_numpy(loss, z - moved, p, z)) / 2e-6
        np.testing.assert_allclose(gradient[:, token], wanted, atol=2e-5)


def test_only_weighted_positions_whose_best_token_can_be_drafted_count() -> None:
    target = tiny_target()
    head = tiny_head(target, draft_vocab=48)
    rng = np.random.default_rng(1)
    outputs = [mx.array(rng.normal(size=(2, 10, 32)), mx.float32) for _ in range(2)]
    last = mx.array(rng.normal(size=(30, 32)), mx.float32)
    labels = soft_labels(target, last, head.token_ids)
    select = mx.array(rng.integers(0, 20, (2, 30)), mx.int32)
    weights = mx.array(rng.uniform(0, 1, (2, 30)) * rng.integers(0, 2, (2, 30)), mx.float32)
    loss, by_step, hits = ChunkedLoss(head, target, last, weights)(outputs, select)
    assert loss.item() == pytest.approx(np.array(by_step).sum(), rel=1e-5)
    for step in range(2):
        logits = head.logits(outputs[step].reshape(20, 32)[select[step]])
        counted = np.array(weights[step] * labels.inside)
        wanted = (counted * np.array(soft_cross_entropy(logits, labels.probs))).sum()
        assert by_step[step].item() == pytest.approx(wanted, rel=1e-4)
        same = np.array(mx.argmax(logits, axis=-1)) == np.array(labels.best)
        assert hits[step].item() == pytest.approx((counted * same).sum(), rel=1e-4, abs=1e-6)
