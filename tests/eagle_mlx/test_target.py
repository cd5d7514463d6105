"""Targets: captured hidden states, the parts that are found, and refused models."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import TargetError
from eagle_mlx.target import Target, load_target
from tests.architectures import tiny_model
from tests.fakes import tiny_head, tiny_target, tiny_target_folder

TOKENS = mx.array([[1, 5, 9, 2], [3, 3, 7, 8]])


def test_capture_changes_no_logit_and_no_parameter() -> None:
    watched, plain = tiny_target(), tiny_target()
    names = [k for k, _ in nn.utils.tree_flatten(watched.model.parameters())]
    out = watched.forward(TOKENS, aux_layers=(0, 2, 3))
    assert mx.array_equal(out.logits, plain.model(TOKENS))
    assert [k for k, _ in nn.utils.tree_flatten(watched.model.parameters())] == names
    assert isinstance(watched.model.layers[0], type(plain.model.layers[0]))


def test_aux_layers_are_outputs_of_layers_counted_from_zero() -> None:
    target = tiny_target()
    out = target.forward(TOKENS, aux_layers=(3, 0))
    hidden = target.embed(TOKENS)
    hidden = tiny_target().model.layers[0](hidden, "causal", None)
    np.testing.assert_allclose(np.array(out.aux[1]), np.array(hidden), rtol=1e-4, atol=1e-5)
    logits = target.lm_head(target.norm(out.aux[0]))
    np.testing.assert_allclose(np.array(logits), np.array(out.logits), rtol=1e-4, atol=1e-5)


def test_a_layer_watched_twice_is_watched_once() -> None:
    target = tiny_target()
    first = target.forward(TOKENS, aux_layers=(1,)).aux[0]
    kind = type(target.model.layers[1])
    second = target.forward(TOKENS, aux_layers=(1, 2)).aux[0]
    assert type(target.model.layers[1]) is kind
    assert mx.array_equal(first, second)


def test_targets_of_one_model_do_not_know_of_one_another() -> None:
    first = tiny_target()
    second = Target(first.model)
    wanted = tiny_target().forward(TOKENS, aux_layers=(1, 3), ends=[1, 2])
    for target in (first, second, first, Target(first.model)):
        out = target.forward(TOKENS, aux_layers=(1, 3), ends=[1, 2])
        for got, want in zip((out.logits, *out.aux), (wanted.logits, *wanted.aux), strict=True):
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-4, atol=1e-5)


def test_a_target_that_is_gone_leaves_nothing_in_its_model() -> None:
    target = tiny_target()
    model, gone = target.model, weakref.ref(target)
    target.forward(TOKENS, aux_layers=(1, 3), ends=[1, 2])
    del target
    gc.collect()
    assert gone() is None
    assert mx.array_equal(model(TOKENS), tiny_target().model(TOKENS))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3n", r"give \[4, 1, 2, 32\] for \[1, 2\] tokens of 32"), ("iquestloopcoder", "called in parts")],
)
def test_hidden_states_that_are_none_are_refused(name: str, reason: str) -> None:
    target = Target(tiny_model(name))
    assert target.forward(mx.array([[1, 2]])).logits.shape == (1, 2, target.vocab_size)
    with pytest.raises(TargetError, match=f"models of type {name} cannot be read.*{reason}.*without a head"):
        target.forward(mx.array([[1, 2]]), aux_layers=(0,))
    with pytest.raises(TargetError, match=f"models of type {name} cannot be read"):
        em.Engine(target, em.HeadProposer(tiny_head(target)))
    reader = em.NgramProposer()
    em.Engine(target, reader)
    reader.aux_layers = (0,)
    with pytest.raises(TargetError, match=f"models of type {name} cannot be read"):
        em.Engine(target, reader)


def test_a_layer_that_the_target_lacks_is_named() -> None:
    with pytest.raises(TargetError, match="there is no layer 4: the target has layers 0 to 3"):
        tiny_target().forward(TOKENS, aux_layers=(4,))


def test_a_model_without_known_parts_says_what_was_looked_for() -> None:
    with pytest.raises(TargetError, match="no backbone found.*looked for model, "):
        Target(nn.Linear(2, 2))


def test_a_folder_loads_with_its_tokenizer_and_shape(tmp_path: Path) -> None:
    target = load_target(tiny_target_folder(tmp_path / "t"))
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.context_length) == (4, 32, 4096, 512)
    assert target.tokenizer is not None
    assert target.eos_token_ids == {0, 2}


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_an_error_that_names_it(tmp_path: Path, missing: str) -> None:
    folder = tiny_target_folder(tmp_path / "broken")
    (folder / missing).unlink()
    with pytest.raises(TargetError, match="broken"):
        load_target(folder)


def test_the_logits_of_one_position_a_row_are_those_of_all_cut() -> None:
    """In the first such forward, which tests whether the final norm can be cut, and in later ones."""
    tokens = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    target = tiny_target()
    whole = target.forward(tokens).logits
    normed: list[int] = []
    inner = target.lm_head
    for expected in (4, 1):
        target.model.model.embed_tokens.as_linear = lambda h: (normed.append(h.shape[1]), inner(h))[1]  # type: ignore[func-returns-value]
        out = target.forward(tokens, aux_layers=(1,), ends=[3, 1])
        del target.model.model.embed_tokens.as_linear
        assert out.logits.shape == (2, 1, 128)
        assert mx.allclose(out.logits[:, 0], mx.stack([whole[0, 3], whole[1, 1]]), atol=1e-4)
        assert out.aux[0].shape[1] == 4
        assert normed.pop() == expected
    assert target.forward(tokens).logits.shape == (2, 4, 128)


def test_a_final_norm_that_is_called_more_than_once_is_left_alone() -> None:
    target = tiny_target()
    backbone = target.model.model
    base = type(backbone)

    class Looped(base):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: mx.array, *args: object, **kwargs: object) -> mx.array:
            once = super().__call__(inputs, *args, **kwargs)
            return self.norm(once)

    backbone.__class__ = Looped
    tokens = mx.array([[1, 2, 3, 4]])
    whole = target.forward(tokens).logits
    for _ in range(3):
        assert mx.allclose(target.forward(tokens, ends=[2]).logits[0, 0], whole[0, 2], atol=1e-4)
