from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.train.step.losses import ChunkedLoss, soft_cross_entropy, soft_labels, step_weights
from tests.fakes import tiny_head, tiny_target


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


def test_cross_entropy_and_its_gradient() -> None:
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(0, 5, (6, 20)), mx.float32)
    probs = mx.softmax(mx.array(rng.normal(0, 2, (6, 20)), mx.float32), axis=-1)
    log_q = np.array(logits) - np.log(np.exp(np.array(logits, np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(soft_cross_entropy(logits, probs), -(np.array(probs) * log_q).sum(-1), rtol=1e-5)
    gradient = mx.grad(lambda z: mx.sum(soft_cross_entropy(z, probs)))(logits)
    np.testing.assert_allclose(gradient, mx.softmax(logits, axis=-1) - probs, atol=2e-6)


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
