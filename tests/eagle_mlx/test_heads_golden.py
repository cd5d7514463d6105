"""Heads in other projects' layouts equal their reference implementations (tests/golden/make.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

from eagle_mlx.cache import RaggedCache
from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats.tensors import read_tensors, weights_of
from eagle_mlx.heads import load_head
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.mtp import MTPHead, mtp_of_model
from eagle_mlx.heads.mtp.formats import save_split
from eagle_mlx.target import Target
from tests.fakes import tiny_config
from tests.golden import draws

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
CLOSE = 1e-4

Config = dict[str, Any]
Shapes = dict[str, list[int]]


def target() -> Target:
    """A model with the references' embedding, norm and projection, and six layers that do not matter."""
    config = tiny_config(layers=6, hidden=draws.HIDDEN, vocab=draws.VOCAB) | {"tie_word_embeddings": False}
    model = qwen3.Model(qwen3.ModelArgs(**config))  # type: ignore[arg-type]
    model.model.embed_tokens.weight = mx.array(draws.target("embed_tokens"))
    model.model.norm.weight = mx.array(draws.target("norm"))
    model.lm_head.weight = mx.array(draws.target("lm_head"))
    return Target(model)


TARGET = target()


def written(folder: Path, name: str, change: Callable[[Config, dict[str, mx.array]], None] | None = None) -> Path:
    """Write a golden head as a checkpoint, possibly changed."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    config, tensors = golden["config"], {}
    for key, shape in golden["tensors"].items():
        value = draws.draw(key if published(name) else key.removeprefix("model."), shape)
        value = np.ones_like(value) if key in golden.get("ones", ()) else value
        value = mx.array(value - 1 if key in golden.get("minus_one", ()) else value)
        tensors |= draws.packed(key, value, config.get("quantization"))
    if change is not None:
        change(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def published(name: str) -> bool:
    """Return whether the golden file has an MTP layer in its model's published form."""
    return name.startswith("mtp-")


def loaded(folder: Path, name: str) -> DraftHead:
    head: DraftHead = mtp_of_model(folder)[0] if published(name) else load_head(folder, TARGET)
    return head


def logits(head: DraftHead) -> dict[str, mx.array]:
    """Compute the golden files' logits: the first step everywhere, and recycled steps after some positions."""
    head.attach(TARGET)
    ids = draws.TOKENS.tolist()
    g = head.features([mx.array(draws.aux(k))[None] for k in head.named_layers or (-1,)])
    first = head.logits(head(head.embed(mx.array(ids[1 : draws.LENGTH + 1])[None]), g, mask="causal"))[0]
    chains = []
    for at in draws.CHAINS:
        cache = RaggedCache(head.cache_layers, 1)
        h = head(head.embed(mx.array(ids[1 : at + 2])[None]), g[:, : at + 1], cache)[:, -1:]
        cache.lengths.advance(at + 1)
        steps = []
        for step in range(draws.STEPS):
            h = head(head.embed(mx.array([[ids[at + 2 + step]]])), h, cache)
            cache.lengths.advance(1)
            steps.append(head.logits(h)[0, 0])
        chains.append(mx.stack(steps))
    return {"first": first, "chains": mx.stack(chains)}


def difference(name: str, head: DraftHead) -> float:
    """Return the largest deviation from the golden logits, relative to the largest of them."""
    wanted, got = mx.load(str(GOLDEN / f"{name}.safetensors")), logits(head)
    assert isinstance(wanted, dict)
    return max(float((mx.abs(got[key] - value).max() / mx.abs(value).max()).item()) for key, value in wanted.items())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references(name: str, tmp_path: Path) -> None:
    assert difference(name, loaded(written(tmp_path / "h", name), name)) < CLOSE


def fields(**changes: Any) -> Callable[[Config, dict[str, mx.array]], None]:
    """Return a change of config fields; None removes a field."""

    def change(config: Config, tensors: dict[str, mx.array]) -> None:
        for name, value in changes.items():
            config.pop(name, None) if value is None else config.update({name: value})

    return change


def layer_fields(**changes: Any) -> Callable[[Config, dict[str, mx.array]], None]:
    """Return the same change inside the description of a speculator's layer."""
    return lambda config, _: config["transformer_layer_config"].update(changes)


def nested_text(**changes: Any) -> Callable[[Config, dict[str, mx.array]], None]:
    return lambda config, _: config["text_config"].update(changes)


def nested(**changes: Any) -> Callable[[Config, dict[str, mx.array]], None]:
    return lambda config, _: config["eagle_config"].update(changes)


def without(flag: str, *names: str, kind: str | None = None) -> Callable[[Config, dict[str, mx.array]], None]:
    """Return a change that unsets a flag and removes its tensors."""

    def change(config: Config, tensors: dict[str, mx.array]) -> None:
        layer = config.get("transformer_layer_config", config)
        (config if flag in config else layer)[flag] = False
        if kind:
            layer["model_type"] = kind
        for key in [key for key in tensors if any(name in key for name in names)]:
            del tensors[key]

    return change


def plain_names(config: Config, tensors: dict[str, mx.array]) -> None:
    for key in list(tensors):
        tensors[key.removeprefix("mtp.")] = tensors.pop(key)


def one_layer(config: Config, tensors: dict[str, mx.array]) -> None:
    config["transformer_layer_config"]["num_hidden_layers"] = 1
    for key in [key for key in tensors if key.startswith("layers.1.")]:
        del tensors[key]


ATTENTION_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BROKEN = {
    "eagle": {
        "the bias": without("bias", "fc.bias"),
        "eps": fields(rms_norm_eps=0.1),
        "theta": fields(rope_theta=500.0),
    },
    "eagle-qkv-bias": {"the biases": without("qkv_bias", "proj.bias")},
    "safeailab-eagle3": {
        "the residual": fields(norm_before_residual=True),
        "feedback": fields(norm_output=True, norm_before_residual=False),
        "the layers": fields(eagle_aux_hidden_state_layer_ids=[1, 3, 3]),
        "scaling": fields(rope_scaling={"type": "linear", "factor": 4.0}),
        "a window": fields(use_sliding_window=True, sliding_window=3),
    },
    "specforge-eagle3.1": {
        "whose flag": fields(eagle_mlx={}),
        "the norms": without("fc_norm", "fc_norm."),
    },
    "specforge-no-norm": {"the norm": fields(norm_output=True)},
    "angelslim-qkv-bias": {
        "scaling": fields(rope_scaling=None),
        "the biases": without("attention_bias", *ATTENTION_BIASES),
    },
    "sglang-narrow": {"feedback": fields(norm_output=False), "the residual": fields(norm_before_residual=False)},
    "sliding": {"the window": fields(sliding_window=5), "no window": fields(use_sliding_window=False)},
    "modelopt-yarn": {
        "no scaling": fields(rope_scaling=None),
        "no last norm": nested(use_last_layernorm=False),
    },
    "deepspec-eagle3": {
        "the layers": fields(target_layer_ids=[0, 1, 2, 3, 4]),
        "q and k": without("qk_norm", "q_norm", "k_norm"),
        "the embedding": without("own", "embed_tokens"),
        "feedback": fields(norm_output=True),
    },
    "speculators": {
        "the residual": fields(norm_before_residual=True),
        "nothing said of it": fields(norm_before_residual=None),
        "the layers": fields(eagle_aux_hidden_state_layer_ids=[2, 1, 4]),
    },
    "speculators-norm-before-fc": {
        "the norm": without("norm_before_fc", "input_norm"),
        "the attention's biases": without("attention_bias", *ATTENTION_BIASES),
        "the others": without("mlp_bias", "mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"),
    },
    "speculators-3.1": {
        "feedback": fields(norm_output=False),
        "the norms": without("fc_norm", "fc_norm."),
        "q and k": without("attention_bias", "q_norm", "k_norm", kind="llama"),
    },
    "speculators-two-layers": {"one layer": one_layer},
    "speculators-llama3": {"scaling": layer_fields(rope_parameters=ROPE)},
    "speculators-yarn": {"scaling": layer_fields(rope_parameters={"rope_type": "default", "rope_theta": 1000.0})},
    "speculators-sliding": {"all sliding": layer_fields(layer_types=["sliding_attention"] * 2)},
    "speculators-mtp-qwen3": {"the hidden state": fields(eagle_mlx={"target_norm": True})},
    "mlx-vlm-mtp-qwen3.5": {"eps": nested_text(rms_norm_eps=0.1)},
    "mlx-vlm-mtp-raw": {"the norms": plain_names},
    "mtp-mimo": {"theta": fields(rope_theta=5.0)},
    "mtp-glm-4.5": {"eps": fields(rms_norm_eps=0.1), "rotation": fields(partial_rotary_factor=1.0)},
}
CASES = [(name, what) for name, broken in BROKEN.items() for what in broken]


@pytest.mark.parametrize(("name", "what"), CASES, ids=lambda part: part)
def test_a_flag_read_wrongly_is_noticed(name: str, what: str, tmp_path: Path) -> None:
    head = loaded(written(tmp_path / "h", name, BROKEN[name][what]), name)
    assert difference(name, head) > 100 * CLOSE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fields(target_layer_ids=[-1, 0, 1, 2, 3]), "the embedding's output as an aux layer"),
        (fields(target_layer_ids=None), "lacks target_layer_ids"),
        (fields(num_hidden_layers=2), "Qwen3Eagle3Model of several layers"),
        (fields(architectures=["Gemma4Eagle3Model"]), "Gemma 4's layer"),
    ],
)
def test_heads_of_deepspec_that_cannot_be_computed(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(written(tmp_path / "h", "deepspec-eagle3", change), "deepspec-eagle3")


@pytest.mark.parametrize("name", [name for name in NAMES if "mtp" in name])
@pytest.mark.parametrize("field", ["hidden_first", "norm_output", "target_norm"])
def test_a_way_of_mtp_that_is_mistaken_is_noticed(name: str, field: str, tmp_path: Path) -> None:
    head = loaded(written(tmp_path / "h", name), name)
    assert isinstance(head, MTPHead)
    head.config = replace(head.config, **{field: not getattr(head.config, field)})
    assert difference(name, head) > 100 * CLOSE


@pytest.mark.parametrize("name", ["mtp-qwen3-next", "mtp-qwen3.5", "speculators-mtp-qwen3_next"])
@pytest.mark.parametrize("added", ["all", "layer", "around", "none"])
def test_norms_whose_one_was_added_already(name: str, added: str, tmp_path: Path) -> None:
    """Copies of published models have 1 added to all norms, only to those of the layer, or to none."""
    ends = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")

    def change(config: Config, tensors: dict[str, mx.array]) -> None:
        for key, value in tensors.items():
            kind = "layer" if key.endswith(ends) else "around"
            if value.ndim == 1 and "norm" in key and added in ("all", kind):
                tensors[key] = value + 1

    folder = written(tmp_path / "h", name, change)
    assert difference(name, loaded(folder, name)) < CLOSE
    if published(name):
        notes = mtp_of_model(folder)[1]
        assert len(notes) == 2
        assert ["one was added" in note for note in notes] == [added in ("none", "around"), added in ("none", "layer")]


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "8-bits"])
def test_a_head_of_mlx_vlm_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    name = f"mlx-vlm-mtp-{name}"
    folder = written(tmp_path / "h", name)
    save_split(mtp_head(folder), tmp_path / "again", dtype=mx.float32)
    before, after = read_tensors(folder), read_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(after[key], value) for key, value in before.items())
    assert difference(name, load_head(tmp_path / "again", TARGET)) < CLOSE


def mtp_head(folder: Path) -> MTPHead:
    head = load_head(folder, TARGET)
    assert isinstance(head, MTPHead)
    return head


BITS = {"group_size": 32, "bits": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nested_text(mtp_num_hidden_layers=2), "2 MTP layers; only one"),
        (lambda _, t: t.update({"layers.1.x": t["norm.weight"]}), "2 MTP layers; only one"),
        (lambda _, t: t.update({"layers.0.x": t["norm.weight"]}), "not known to this format: layers.0.x"),
        (lambda _, t: t.pop("fc.biases"), "missing: fc.biases"),
        (nested_text(mtp_use_dedicated_embeddings=True), "no embedding"),
        (nested_text(model_type="nemotron_h"), "nemotron_h are not supported"),
        (fields(text_config=None), "lacks text_config"),
        (fields(quantization=None), "only those that MLX has quantized"),
        (fields(quantization={**BITS, "mode": "mxfp8"}, quantization_config=None), "only affine is supported"),
        (fields(quantization={**BITS, "fc": {**BITS, "bits": 4}}, quantization_config=None), "quantize all layers"),
    ],
)
def test_split_layers_that_cannot_be_computed(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_head(written(tmp_path / "h", "mlx-vlm-mtp-8-bits", change))


def test_a_quantization_that_names_layers(tmp_path: Path) -> None:
    """A field of the model whose layer it was: the head's layers have other bits than most of the model's."""

    def change(config: Config, tensors: dict[str, mx.array]) -> None:
        names = [key.removesuffix(".scales") for key in tensors if key.endswith(".scales")]
        quantization = {
            "group_size": 64,
            "bits": 4,
            "lm_head": {**BITS, "bits": 6},
            "x": False,
            **dict.fromkeys(names, BITS),
        }
        config.update(quantization=quantization, quantization_config=quantization)

    assert difference("mlx-vlm-mtp-8-bits", mtp_head(written(tmp_path / "h", "mlx-vlm-mtp-8-bits", change))) < CLOSE


@pytest.mark.parametrize("same", [True, False])
def test_ends_that_are_the_models_own_are_left_to_the_target(same: bool, tmp_path: Path) -> None:
    def change(config: Config, tensors: dict[str, mx.array]) -> None:
        for mine, theirs in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"{theirs}.weight"] = tensors[f"model.layers.3.{mine}.weight"] + (0 if same else 1)

    head = mtp_of_model(written(tmp_path / "h", "mtp-deepseek-v3", change))[0]
    assert (head.config.own_embedding, head.config.own_lm_head) == (not same, not same)
    assert (difference("mtp-deepseek-v3", head) < CLOSE) == (not same)


def test_weights_of_eight_bits_are_read_with_their_scales(tmp_path: Path) -> None:
    """As DeepSeek publishes them: one scale per block of 128 by 128."""
    names = ["self_attn.q_a_proj", "self_attn.kv_b_proj", "mlp.experts.2.up_proj"]

    def change(config: Config, tensors: dict[str, mx.array]) -> None:
        for name in (f"model.layers.3.{part}.weight" for part in names):
            weight = tensors[name]
            blocks = tuple(-(-n // 128) for n in weight.shape)
            small = mx.to_fp8(weight / 0.01)
            tensors[name] = (mx.from_fp8(small, dtype=mx.bfloat16) * 0.01).astype(mx.bfloat16).astype(mx.float32)
            if eight_bits:
                tensors |= {name: small, f"{name}_scale_inv": mx.full(blocks, 0.01)}

    heads = []
    for eight_bits in (False, True):
        heads.append(mtp_of_model(written(tmp_path / str(eight_bits), "mtp-deepseek-v3", change))[0])
    wanted, got = (weights_of(head) for head in heads)
    assert wanted.keys() == got.keys()
    assert all(mx.allclose(wanted[name], got[name], rtol=1e-2, atol=1e-4) for name in wanted)
