"""Muse Glimmer's assistant: a DFlash head under other names, compared with its definition in NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import eagle_mlx as em
from eagle_mlx.errors import CheckpointError
from eagle_mlx.heads import load_head
from eagle_mlx.heads.block import DFlashHead
from eagle_mlx.target import Target
from tests.architectures import tiny_model
from tests.fakes import randomize

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, SLOTS, WINDOW, THETA = 32, 4, 2, 16, 2, 5, 3, 500000.0
CONFIG: dict[str, Any] = {  # the fields of the published head
    "architectures": ["MuseGlimmerAssistantModel"],
    "block_size": SLOTS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention"] * LAYERS,
    "mask_token_id": 3,
    "max_position_embeddings": 512,
    "model_type": "muse_glimmer_assistant",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "sliding_window": WINDOW,
    "target_layer_ids": [0, 2],
}
Array = NDArray[np.float64]


def muse() -> Target:
    model = tiny_model("muse_glimmer", output_multiplier=4.0, final_logit_softcapping=3.0)
    randomize(model, 0, 0.2)
    return Target(model, name="muse")


def weights() -> dict[str, NDArray[np.float32]]:
    layer = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "self_attn.q_norm": (DIM,),
        "self_attn.k_norm": (DIM,),
        "mlp.gate_proj": (48, HIDDEN),
        "mlp.up_proj": (48, HIDDEN),
        "mlp.down_proj": (HIDDEN, 48),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {f"layers.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    ends = {"encoder.fc": (HIDDEN, 2 * HIDDEN), "encoder.output_norm_enc": (HIDDEN,), "norm": (HIDDEN,)}
    rng = np.random.default_rng(0)
    return {
        f"{name}.weight": (rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)).astype("f4")
        for name, shape in (shapes | ends).items()
    }


def write(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(x) for name, x in weights().items()})
    return folder


def normed(x: Array, weight: Any) -> Array:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-5) * weight


def turned(x: Array, positions: Array) -> Array:
    """Apply RoPE to x [n, heads, D], whose halves are the two coordinates."""
    angles = positions[:, None, None] * THETA ** (-np.arange(DIM // 2) * 2 / DIM)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], -1
    )


def defined_logits(target: Target, tokens: list[int], aux: list[Array], window: int) -> Array:
    """Return the logits [SLOTS, V] of a block after a context with the hidden states `aux`, by the definition."""
    w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in weights().items()}
    table, projection = (
        np.array(part.weight, np.float64) for part in (target.model.model.embed_tokens, target.model.lm_head)
    )
    c, x = normed(np.concatenate(aux, -1) @ w["encoder.fc"].T, w["encoder.output_norm_enc"]), table[tokens]
    positions = np.arange(len(c) + SLOTS)
    slots = positions[len(c) :]
    sees = np.abs(slots[:, None] - positions) <= window
    for index in range(LAYERS):
        own = {name.removeprefix(f"layers.{index}."): part for name, part in w.items() if f"layers.{index}." in name}
        a = normed(x, own["input_layernorm"])
        read = np.concatenate([c, a])
        q, k, v = (
            (inputs @ own[f"self_attn.{name}_proj"].T).reshape(len(inputs), -1, DIM)
            for name, inputs in (("q", a), ("k", read), ("v", read))
        )
        q = turned(normed(q, own["self_attn.q_norm"]), slots)
        k = turned(normed(k, own["self_attn.k_norm"]), positions)
        k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
        scores = np.where(sees, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM), -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", chances, v).reshape(SLOTS, -1) @ own["self_attn.o_proj"].T
        a = normed(x, own["post_attention_layernorm"])
        gate = a @ own["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (a @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return np.asarray(normed(x, w["norm"]) @ projection.T)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("window", [WINDOW, 2048])
def test_its_logits_are_those_of_the_definition(window: int, nested: bool, tmp_path: Path) -> None:
    """The window is narrower than the block, so that it matters on both sides of a slot."""
    config = {**CONFIG, "sliding_window": window}
    if nested:
        config["dflash_config"] = {
            name: config.pop(name) for name in ("block_size", "mask_token_id", "target_layer_ids")
        }
    target = muse()
    head = load_head(write(tmp_path / "h", config), target)
    assert isinstance(head, DFlashHead)
    rng = np.random.default_rng(1)
    aux = [rng.normal(size=(9, HIDDEN)) for _ in range(2)]
    tokens = [7, 3, 3, 3, 3]
    g = head.features([mx.array(states[None], mx.float32) for states in aux])
    logits = head.logits(head(head.embed(mx.array([tokens])), g))[0]
    np.testing.assert_allclose(logits, defined_logits(target, tokens, aux, window), atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": True}, "is_causal is true; slots of Muse Glimmer's assistants see later ones"),
        ({"dflash_config": {"causal": True}}, "sets causal, which block drafters here do not support"),
        ({"attention_sink_bias": True}, "sets attention_sink_bias"),
        ({"final_logit_softcapping": 20.0}, "sets final_logit_softcapping"),
        ({"hidden_act": "gelu"}, "only silu is known"),
        ({"sliding_window": None}, "sliding_window is not given"),
        ({"mask_token_id": 9999}, "mask_token_id 9999 is not in a vocabulary"),
        ({"attention_bias": True}, "missing: layers.0.self_attn.k_proj.bias"),
        ({"target_layer_ids": [0]}, r"encoder.fc.weight has shape \(32, 64\)"),
    ],
)
def test_what_differs_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_head(write(tmp_path / "h", {**CONFIG, **changes}), muse())


def test_its_vocabulary_is_the_targets(tmp_path: Path) -> None:
    folder, target = write(tmp_path / "h"), muse()
    assert load_head(folder, target).vocab_size == target.vocab_size
    with pytest.raises(CheckpointError, match="vocab_size is missing; load the head with its target"):
        load_head(folder)


def test_text_drafted_with_it_is_the_targets(tmp_path: Path) -> None:
    target, params = muse(), em.SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5], [9], list(range(30))]
    head = load_head(write(tmp_path / "h"), target)
    drafted = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(4)).generate(prompts, params)
    plain = em.Engine(target).generate(prompts, params)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert sum(output.drafted for output in drafted) > 20
