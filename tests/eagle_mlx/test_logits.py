"""Logits of given hidden states are the model's own, whatever it does to them after its final norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target
from tests.architectures import CONFIGS, SCALED, VOCAB, tiny_model
from tests.eagle_mlx.heads import dflash, dspark, eagle, mtp
from tests.fakes import randomize
from tests.full import in_turn

TOKENS = mx.array(np.random.default_rng(0).integers(0, VOCAB, (2, 9)))


def target_of(name: str, **changes: Any) -> Target:
    model = tiny_model(name, **{**SCALED.get(name, {}), **changes})
    randomize(model, 0, 0.2)
    return Target(model, name=name)


def variation(logits: mx.array, others: mx.array) -> float:
    """Return the largest total variation between two distributions [..., V]."""
    p, q = (mx.softmax(x.astype(mx.float32), axis=-1) for x in (logits, others))
    return float(mx.max(mx.sum(mx.abs(p - q), axis=-1)) / 2)


@pytest.mark.parametrize("name", [*SCALED, *in_turn([name for name in CONFIGS if name not in SCALED], of=6)])
def test_logits_of_hidden_states_are_the_models_own(name: str) -> None:
    target = target_of(name)
    own = target.model(TOKENS)
    hidden = target.forward(TOKENS).hidden
    assert hidden is not None
    normed = target.norm(hidden)
    np.testing.assert_allclose(target.logits(normed), own, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(target.logits(normed[1]), own[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(target.logits(normed[1, 3]), own[1, 3], rtol=1e-4, atol=1e-4)
    assert mx.array_equal(target.model(TOKENS), own), "the model works as before"
    assert (variation(target.lm_head(normed), own) > 0.05) == (name in SCALED), "all scaled models are in SCALED"


def test_logits_run_no_layer_of_the_model() -> None:
    target = target_of("granite")
    states = mx.random.normal((3, 32), key=mx.random.key(0))
    wanted = target.logits(states)
    for layer in target.layers:
        layer.update({"self_attn": {"q_proj": {"weight": mx.zeros((1, 1))}}})  # it can no longer be called
    assert mx.array_equal(target.logits(states), wanted)


@pytest.mark.parametrize(
    ("name", "cap"),
    [("gemma2", 1.5), ("muse_glimmer", 3.0), ("recurrent_gemma", 1.5), ("gemma4", 1.5), ("granite", None)],
)
def test_the_soft_cap_of_logits_is_read_from_the_logits(name: str, cap: float | None) -> None:
    assert target_of(name).logit_cap == cap


@pytest.mark.parametrize("make", [eagle, mtp, dflash, dspark])
@pytest.mark.parametrize("name", ["granite", "cohere", "muse_glimmer", "recurrent_gemma"])
def test_heads_that_borrow_the_projection_compute_logits_as_the_target(
    name: str, make: Callable[[Target], DraftHead]
) -> None:
    target = target_of(name)
    head = make(target)
    head.attach(target)
    h = mx.random.normal((2, 3, 32), key=mx.random.key(0))
    normed = head.norm(h) if isinstance(head.config, type(mtp(target).config)) else h
    assert mx.allclose(head.logits(h), target.logits(normed), rtol=1e-4, atol=1e-5)
    assert variation(head.logits(h), target.lm_head(normed)) > 0.05


def test_a_block_head_with_its_own_projection_has_the_targets_soft_cap() -> None:
    target = target_of("gemma2")
    head = dflash(target, own_lm_head=True)
    head.attach(target)
    h = mx.random.normal((1, 3, 32), key=mx.random.key(0))
    assert mx.allclose(head.logits(h), 1.5 * mx.tanh(head.lm_head(h) / 1.5), atol=1e-5)
