from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.kinds.base import projection
from eagle_mlx.train.step.losses import (
    LOSSES,
    ChunkedLoss,
    Labels,
    Objective,
    confidence_loss,
    feature_losses,
    soft_cross_entropy,
    soft_labels,
    step_loss,
)
from eagle_mlx.train.step.step import objective_of, weights_of_steps
from tests.architectures import SCALED, tiny_model
from tests.eagle_mlx.heads import dflash2, dspark
from tests.fakes import randomize, tiny_head, tiny_target


def test_step_weights_fall_and_sum_to_one() -> None:
    def weights(**settings: Any) -> list[float]:
        return [float(weight) for weight in weights_of_steps(resolve(TrainConfig.of(**settings), 32))]

    falling = weights(unroll=4, decay=0.5)
    assert sum(falling) == pytest.approx(1.0)
    assert [falling[i + 1] / falling[i] for i in range(3)] == pytest.approx([0.5] * 3)
    assert weights(unroll=3, decay=1.0) == pytest.approx([1 / 3] * 3)
    assert weights(step_weights=(4.0, 2.0, 2.0)) == pytest.approx([0.5, 0.25, 0.25])


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
    assert projection(target).dtype == mx.float32
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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reads", ["nothing", "states", "states and tokens"])
def test_an_objective_is_the_weighted_sum_of_its_parts(loss: str, reads: str) -> None:
    """The variation term is |p - q|, without the half; the confidence learns the probability of acceptance."""
    confident = {"confidence_head": reads != "nothing", "confidence_with_markov": reads == "states and tokens"}
    target = tiny_target()
    head = dspark(target, **confident)
    head.attach(target)
    rng = np.random.default_rng(0)
    h, latent, before = (rng.normal(size=(6, size)).astype(np.float32) for size in (32, 32, 32))
    labels = Labels(
        mx.array(rng.dirichlet(np.full(128, 0.3), 6), mx.float32),
        mx.array(rng.integers(0, 128, 6), mx.int32),
        mx.array([1.0, 1, 0, 1, 0, 1]),
    )
    weights = mx.array(rng.uniform(0, 1, 6), mx.float32)
    logits = head.logits(mx.array(h)) + head.markov_head.markov_w2(mx.array(latent))
    z, p = np.array(logits, np.float64), np.array(labels.probs, np.float64)
    q = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    distance = np.abs(p - q).sum(-1)
    of_tokens = -np.log(q[range(6), np.array(labels.best)]) if loss == "hard" else in_numpy(loss, z, p, z)
    of_confidence = np.zeros(6)
    if reads != "nothing":
        sure = np.array(head.confidence_head(mx.array(h), mx.array(before) if "tokens" in reads else None), np.float64)
        accepted, chance = np.minimum(p, q).sum(-1), 1 / (1 + np.exp(-sure))
        of_confidence = -accepted * np.log(chance) - (1 - accepted) * np.log(1 - chance)
    x = mx.array(np.concatenate([h, latent, before], axis=-1))
    for token, variation, confidence in ((1.0, 0.0, 0.0), (0.3, 0.7, 0.0), (0.3, 0.0, 0.2), (0.3, 0.7, 0.2)):
        computed, _ = step_loss(head, x, labels, weights, Objective(loss, token, variation, confidence))
        parts = token * of_tokens + variation * distance + confidence * of_confidence
        assert computed.item() == pytest.approx((np.array(weights * labels.inside) * parts).sum(), rel=1e-4)


@pytest.mark.parametrize("selector", [0.0, 1.0, 0.5])
def test_the_selector_learns_the_targets_token_among_the_largest_logits(selector: float) -> None:
    """A label that is not among them counts in the main loss only. Hits are those of the selector's choice."""
    target = tiny_target()
    head = dflash2(target)
    head.attach(target)
    rng = np.random.default_rng(0)
    h, latent = (rng.normal(size=(40, 32)).astype(np.float32) for _ in range(2))
    z = np.array(head.logits(mx.array(h)), np.float64)
    order = np.argsort(-z, axis=-1)
    best = order[np.arange(40), np.arange(40) % 8]  # half of them are among the four candidates
    labels = Labels(mx.zeros((40, 128)), mx.array(best, mx.int32), mx.array(rng.integers(0, 2, 40), mx.float32))
    weights = mx.array(rng.uniform(0, 1, 40), mx.float32)
    codebook = np.array(head.candidate_selector.successor_codebook.weight, np.float64)
    losses, hits = np.zeros(40), np.zeros(40)
    for at in range(40):
        losses[at] = np.log(np.exp(z[at]).sum()) - z[at, best[at]]
        candidates = order[at, :4].tolist()
        if best[at] in candidates:
            scores = z[at, candidates] + codebook[candidates] @ latent[at]
            label = candidates.index(best[at])
            losses[at] += selector * (np.log(np.exp(scores).sum()) - scores[label])
            hits[at] = scores.argmax() == label
    x, counted = mx.array(np.concatenate([h, latent], axis=-1)), np.array(weights * labels.inside)
    objective = Objective("hard", selector_weight=selector)
    loss, hit = step_loss(head, x, labels, weights, objective)
    assert loss.item() == pytest.approx((counted * losses).sum(), rel=1e-4)
    assert 0 < hit.item() == pytest.approx((counted * hits).sum(), rel=1e-4)
    gradient = mx.grad(lambda x: step_loss(head, x, labels, weights, objective)[0])(x)
    assert bool(mx.all(mx.isfinite(gradient)))
    assert (float(mx.max(mx.abs(gradient[:, 32:]))) > 0) == (selector > 0)


def test_the_feature_distance_is_the_mean_smooth_l1() -> None:
    rng = np.random.default_rng(0)
    outputs, wanted = rng.normal(0, 2, (2, 3, 4, 8)), rng.normal(0, 2, (5, 8))
    select, weights = rng.integers(0, 12, (2, 5)), rng.uniform(0, 1, (2, 5))
    off = np.abs(np.stack([h.reshape(12, 8)[at] for h, at in zip(outputs, select, strict=True)]) - wanted)
    expected = (weights * np.where(off < 1, off**2 / 2, off - 0.5).mean(-1)).sum(-1)
    arrays = (mx.array(x, mx.float32) for x in (wanted, select, weights))
    features, at, share = arrays
    losses = feature_losses([mx.array(h, mx.float32) for h in outputs], features, at.astype(mx.int32), share)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_weight_is_that_of_features_or_in_block_kinds_of_variation(kind: str) -> None:
    given = objective_of(TrainConfig.of(head=kind, loss="tv", loss_weights=(0.2, 0.7)))
    in_blocks, confidence, selector = KINDS[kind].in_blocks, float(kind == "dspark"), float(kind == "dflash2")
    assert given == Objective("tv", 0.7, 0.2 * in_blocks, confidence, selector, 0.2 * (not in_blocks))
    usual = Objective("tv", confidence_weight=confidence, selector_weight=selector)
    assert objective_of(TrainConfig.of(head=kind, loss="tv")) == usual


def test_the_confidence_of_a_draft_is_not_learned_by_the_distribution() -> None:
    """The acceptance is a label: it has no gradient."""
    gradient = mx.grad(lambda accepted: confidence_loss(mx.array([0.3, -2.0]), accepted).sum())(mx.array([0.5, 0.9]))
    assert gradient.tolist() == [0, 0]
