"""Layouts of every kind: identified by content, unchanged by a round trip, refused by name if they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from transformers import Qwen3Config

from eagle_mlx.errors import CheckpointError, ConfigError, HeadError, OutputError
from eagle_mlx.formats.tensors import HeadFolder, read_tensors, weights_of
from eagle_mlx.heads import kind_of, load_head
from eagle_mlx.heads.eagle import save_eagle
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.eagle3.formats import load_speculators, save_speculators
from eagle_mlx.heads.mtp import mtp_of_model
from eagle_mlx.heads.mtp.formats import quantized, save_speculators_mtp, save_split
from eagle_mlx.target import load_target
from tests.eagle_mlx.heads import ALL, KINDS, dflash, eagle, eagle3, mtp
from tests.fakes import tiny_target, tiny_target_folder

TARGET = tiny_target(vocab=64)
SAYABLE = ["eagle3.1", "eagle3, one norm", "eagle3, two layers"]
"""Heads that speculators' format can express."""


def save(head: Any, folder: Path, **options: Any) -> None:
    head.attach(TARGET)
    kind_of(head).formats[0].save(head, folder, target_name="tiny", extra={"step": 3}, **options)


def same_weights(a: Any, b: Any, dtype: mx.Dtype) -> bool:
    mine, theirs = weights_of(a), weights_of(b)
    return mine.keys() == theirs.keys() and all(
        bool(mx.array_equal(mine[name].astype(dtype), value.astype(dtype))) for name, value in theirs.items()
    )


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("dflash, causal", "dspark, rnn")])
def test_the_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    """The folder's name does not matter. The two block heads left out need speculators' layout (test_blocks.py)."""
    head: Any = ALL[name](TARGET)
    save(head, tmp_path / "eagle3-mtp", dtype=mx.float16)
    again = load_head(tmp_path / "eagle3-mtp", TARGET)
    assert type(again) is type(head)
    save(again, tmp_path / "b", dtype=mx.float16)
    assert again.config == head.config
    assert same_weights(again, head, mx.float16)
    assert (tmp_path / "eagle3-mtp" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    before, after = read_tensors(tmp_path / "eagle3-mtp"), read_tensors(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[key], value) for key, value in after.items())
    with pytest.raises(OutputError, match="exists already"):
        save(head, tmp_path / "b")


@pytest.mark.parametrize("name", SAYABLE)
def test_the_round_trip_through_speculators_is_exact(name: str, tmp_path: Path) -> None:
    head: Any = KINDS[name](TARGET)
    head.attach(TARGET)
    save_speculators(head, tmp_path / "s", base_model="org/model", target_architectures=["Qwen3ForCausalLM"], depth=5)
    again = load_head(tmp_path / "s", TARGET)
    assert again.config == head.config
    assert same_weights(again, head, mx.bfloat16)
    assert (again.token_ids is None) == (head.token_ids is None)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [k + 1 for k in head.config.aux_layers]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    held = read_tensors(tmp_path / "s")
    assert {key.split(".")[0] for key in held} >= {"fc", "layers", "lm_head", "norm", "embed_tokens"}
    assert mx.allclose(held["embed_tokens.weight"], TARGET.embed(mx.arange(64)), atol=1e-2)
    save_eagle3(again, tmp_path / "p")
    assert load_head(tmp_path / "p").config == head.config
    change(tmp_path / "s", None, eagle_mlx={})
    assert load_head(tmp_path / "s").config.own_embedding


def test_speculators_reads_the_windows_of_a_layer_like_qwen3s(tmp_path: Path) -> None:
    head = eagle3(TARGET, qk_norm=True, windows=(8, 8), num_hidden_layers=2)
    head.attach(TARGET)
    save_speculators(head, tmp_path / "s", base_model="org/model", target_architectures=["Qwen3ForCausalLM"])
    layers = Qwen3Config(**json.loads((tmp_path / "s" / "config.json").read_text())["transformer_layer_config"])
    assert (layers.sliding_window, layers.layer_types) == (8, ["sliding_attention"] * 2)
    assert load_head(tmp_path / "s", TARGET).config == head.config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_logits": False}, "cannot express norm_logits=False"),
        ({"hidden_size": 24, "own_embedding": True}, "of their target's width, 32, not 24"),
        ({"qk_norm": True, "mlp_bias": True}, "both q/k norms and mlp_bias"),
        ({"num_hidden_layers": 2, "windows": (4, 5)}, "names one size"),
    ],
)
def test_what_speculators_cannot_say(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        save_speculators(eagle3(TARGET, **fields), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_speculators_own_package_reads_it(tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators.models.eagle3")
    torch = pytest.importorskip("torch")
    target = load_target(tiny_target_folder(tmp_path / "target"))
    ids = mx.array([[5, 80, 9, 3, 77, 1]])
    for name in SAYABLE:
        head: Any = KINDS[name](target)
        head.attach(target)
        save_speculators(head, tmp_path / name, base_model=str(tmp_path / "target"), dtype=mx.float32)
        model = speculators.Eagle3DraftModel.from_pretrained(str(tmp_path / name))
        model.config.transformer_layer_config._attn_implementation = "eager"
        again = speculators.Eagle3DraftModel(model.config).float().eval()
        again.load_state_dict(model.state_dict())
        logits: list[Any] = []
        again.lm_head.register_forward_hook(lambda _module, _args, out, logits=logits: logits.append(out.detach()))
        states = mx.random.normal((1, 6, 3 * target.hidden_size), key=mx.random.key(1))
        tokens = torch.tensor(np.array(ids), dtype=torch.long)
        with torch.no_grad():
            again(torch.tensor(np.array(states)), tokens, torch.zeros_like(tokens), ttt_steps=1)
        h = head(head.embed(ids), head.features(mx.split(states, 3, axis=-1)), mask="causal")
        assert mx.allclose(head.logits(h), mx.array(logits[0].numpy()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_next"])
def test_speculators_own_package_reads_mtp_heads(model: str, tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators.models.mtp")
    torch = pytest.importorskip("torch")
    head = mtp(TARGET, model_type=model, norm_output=True, target_norm=False)
    head.attach(TARGET)
    save_speculators_mtp(head, tmp_path / "s", dtype=mx.float32, depth=1)
    config = speculators.MTPSpeculatorConfig(**json.loads((tmp_path / "s" / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    model_of_theirs = speculators.MTPDraftModel(config).float().eval()
    del model_of_theirs.verifier_lm_head
    tensors = read_tensors(tmp_path / "s")
    ends = {"embed_tokens.weight": TARGET.embed(mx.arange(64)), "lm_head.weight": TARGET.lm_head(mx.eye(32)).T}
    model_of_theirs.load_state_dict({name: torch.tensor(np.array(x)) for name, x in (tensors | ends).items()})
    ids, states = mx.array([[5, 40, 9, 3, 57, 1, 7]]), mx.random.normal((1, 7, 32), key=mx.random.key(1))
    with torch.no_grad():
        [theirs], *_ = model_of_theirs(torch.tensor(np.array(ids)), torch.tensor(np.array(states)))
    ours = head.logits(head(head.embed(ids[:, 1:]), states[:, :-1], mask="causal"))
    assert mx.allclose(ours[:, : theirs.shape[1]], mx.array(theirs.numpy()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_next"])
def test_mlx_vlms_own_class_reads_mtp_heads(model: str, tmp_path: Path) -> None:
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters")
    head = mtp(TARGET, model_type=model, norm_output=True)
    save_split(head, tmp_path / "s", dtype=mx.float32)
    x = mx.random.normal((1, 5, 32), key=mx.random.key(1))
    theirs = drafters.load_drafter(str(tmp_path / "s"))[0]._forward_hidden(x, x, None, mx.arange(5)[None])
    assert mx.allclose(head(x, x, mask="causal"), theirs, atol=1e-5)


def test_mlx_vlm_finds_the_angles_of_qwen3_next(tmp_path: Path) -> None:
    """mlx-vlm would use its defaults without `rope_parameters`, which configs of Qwen3-Next do not have."""
    head = mtp(TARGET, model_type="qwen3_next", norm_output=True)
    save_split(head, tmp_path / "s")
    text = json.loads((tmp_path / "s" / "config.json").read_text())["text_config"]
    rope = {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 0, 0]}
    assert text["rope_parameters"] == {"type": "default", **rope}
    head.config = replace(head.config, layer={**head.config.layer, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    with pytest.raises(ConfigError, match="cannot express rope_scaling"):
        save_split(head, tmp_path / "t")


def change(folder: Path, tensors: Callable[[dict[str, mx.array]], Any] | None = None, **config: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensors is not None:
        held = read_tensors(folder)
        tensors(held)
        mx.eval(held)
        mx.save_safetensors(str(folder / "model.safetensors"), held)


@pytest.mark.parametrize(
    ("make", "tensors", "config", "message"),
    [
        (eagle, lambda t: t.pop("fc.bias"), {}, "missing: fc.bias"),
        (eagle, lambda t: t.update(lm_head=t["fc.bias"]), {}, "not known to this format: lm_head"),
        (eagle, None, {"bias": False}, "bias and eagle_fc_bias to different values"),
        (eagle, None, {"num_hidden_layers": 2}, "missing: layers.1.input_layernorm.weight"),
        (eagle, None, {"hidden_act": "gelu"}, "sets hidden_act"),
        (eagle, lambda t: t.pop("fc.weight"), {}, "has a language model and not a head"),
        (eagle, lambda t: [t.pop(k) for k in list(t) if "layers" in k], {}, "has no known head"),
        (eagle, None, {"medusa_num_heads": 4}, "has Medusa heads, which cannot be loaded"),
        (eagle, None, {"model_type": "gemma4_assistant"}, "gemma4_assistant.*reads the target's keys and values"),
        (eagle, None, {"model_type": "gemma4_unified_assistant"}, "reads the target's keys and values; heads that"),
        (dflash, None, {"model_type": "gemma4_assistant"}, "reads the target's keys and values"),
        (eagle, None, {"model_type": "other_assistant"}, "other_assistant.*layout is not supported"),
        (eagle, None, {"architectures": ["LlamaForCausalLMEagle4"]}, "EAGLE-4 is not supported"),
        (eagle, None, {"efficient_lm_head_config": {}}, "EAGLE-4 is not supported"),
        (eagle, None, {"dflash_config": {}}, "block drafter of class"),
        (eagle, None, {"speculators_model_type": "peagle"}, "lacks mask_token_id"),
        (mtp, lambda t: t.pop("enorm.weight"), {}, "missing: enorm.weight"),
        (mtp, lambda t: t.update({"block.x": t["enorm.weight"]}), {}, "not known to this format: block.x"),
        (mtp, None, {"eagle_mlx_mtp": {"model_type": "gpt2", "layer": {}}}, "model_type gpt2 are not supported"),
        (mtp, None, {"eagle_mlx_mtp": {"colour": 1}}, "sets eagle_mlx_mtp.colour, which is not known"),
        (mtp, None, {"eagle_mlx_mtp": {"model_type": "qwen3"}}, "not usable.*layer"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, tensors: Any, config: Any, message: str, tmp_path: Path) -> None:
    save(make(TARGET), tmp_path / "h")
    change(tmp_path / "h", tensors, **config)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "h")


def test_an_eagle_3_head_may_state_the_layers_of_its_target(tmp_path: Path) -> None:
    """As EAGLE3-Vicuna1.3-13B, whose config states 40 layers."""
    head: Any = eagle3(TARGET)
    save(head, tmp_path / "h")
    for stated in (40, 80):
        change(tmp_path / "h", None, num_hidden_layers=stated)
        again: Any = load_head(tmp_path / "h", TARGET)
        assert again.config == head.config
    change(tmp_path / "h", None, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="missing: layers.1"):
        load_head(tmp_path / "h", TARGET)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "gemma3"}}, "has a layer of type gemma3"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48 but the head's own is 32"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "the embedding's output as an aux layer"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "does not name the layers"),
        ({"norm_before_fc": True, "fc_norm": False}, "missing: input_norm.weight; not known to this format: fc_norm.0"),
        ({"draft_vocab_size": 40}, "lacks d2t"),
    ],
)
def test_speculators_that_do_not_fit(config: Any, message: str, tmp_path: Path) -> None:
    head: Any = KINDS["eagle3.1"](TARGET)
    head.attach(TARGET)
    save_speculators(head, tmp_path / "s")
    change(tmp_path / "s", None, **config)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "s")


def test_names_that_two_files_hold(tmp_path: Path) -> None:
    save(eagle(TARGET), tmp_path / "h")
    weights = tmp_path / "h" / "model.safetensors"
    (tmp_path / "h" / "more.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(CheckpointError, match="another file of its folder both have"):
        load_head(tmp_path / "h")


def test_a_layer_under_two_names(tmp_path: Path) -> None:
    save(eagle3(TARGET), tmp_path / "h")
    change(tmp_path / "h", lambda t: t.update({"layers.0.mlp.up_proj.weight": t["midlayer.mlp.up_proj.weight"]}))
    with pytest.raises(CheckpointError, match=r"has midlayer.mlp.up_proj.weight twice, once as"):
        load_head(tmp_path / "h")


@pytest.mark.parametrize(("make", "save_head"), [(eagle, save_eagle), (eagle3, save_speculators)])
def test_layouts_with_an_embedding_need_one(make: Any, save_head: Any, tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="needs its target"):
        save_head(make(TARGET), tmp_path / "h")
    assert not (tmp_path / "h").exists()


def test_a_name_of_layers_that_only_the_target_can_give(tmp_path: Path) -> None:
    head: Any = KINDS["eagle3.1"](TARGET)
    head.attach(TARGET)
    save_speculators(head, tmp_path / "s")
    change(tmp_path / "s", None, eagle_aux_hidden_state_layer_ids=None)
    assert load_head(tmp_path / "s", TARGET).config.aux_layers == (0, 2, 3)
    assert load_speculators(HeadFolder.read(tmp_path / "s", 28)).config.aux_layers == (1, 13, 24)


@pytest.mark.parametrize("name", ["mtp of qwen3-next", "mtp of deepseek", "mtp, own ends"])
def test_a_quantised_head_stays_what_it_is(name: str, tmp_path: Path) -> None:
    head: Any = quantized(KINDS[name](TARGET), bits=8, group_size=32)  # type: ignore[arg-type]
    save(head, tmp_path / "h", dtype=mx.float32)
    again = load_head(tmp_path / "h", TARGET)
    assert again.config == head.config
    assert same_weights(again, head, mx.float32)
    assert any(key.endswith(".scales") for key in weights_of(again))
    assert not any("mlp.gate.scales" in key for key in weights_of(again))
    x = mx.random.normal((1, 3, 32), key=mx.random.key(0))
    head.attach(TARGET)
    assert mx.allclose(head.logits(head(x, x, mask="causal")), again.logits(again(x, x, mask="causal")), atol=1e-4)


def test_a_size_that_cannot_be_quantised() -> None:
    with pytest.raises(ConfigError, match="32 is not a multiple of the group size 64"):
        quantized(mtp(TARGET))


def published(folder: Path) -> None:
    """Write a Qwen-like model with an MTP layer in its makers' format."""
    head = mtp(TARGET, model_type="qwen3_next")
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
    tensors = {}
    for key, value in tree_flatten(head.parameters()):
        part, _, rest = key.partition(".")
        if ".switch_mlp." in rest:
            before, after = rest.split(".switch_mlp.")
            tensors |= {f"mtp.layers.0.{before}.experts.{i}.{after}": x for i, x in enumerate(value)}
        else:
            tensors[f"mtp.layers.0.{rest}" if part == "block" else f"mtp.{names[part]}.{rest}"] = value
    tensors["model.embed_tokens.weight"] = TARGET.embed(mx.arange(64))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config.layer))
    mx.save_safetensors(str(folder / "model-00001-of-00001.safetensors"), tensors)


def test_the_head_of_a_published_model(tmp_path: Path) -> None:
    published(tmp_path / "model")
    head, notes = mtp_of_model(tmp_path / "model", target_norm=False)
    assert same_weights(head, mtp(TARGET, model_type="qwen3_next"), mx.float32)
    assert (head.config.target_norm, head.config.norm_output, head.config.hidden_first) == (False, True, False)
    assert len(notes) == 2
    with pytest.raises(CheckpointError, match="take the head out of it first"):
        load_head(tmp_path / "model")


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("mtp.", "no tensors named mtp.*, so no MTP layer: conversions often leave it out"),
        ("mtp.layers.", "no tensors named layers.0."),
        ("mtp.layers.0.mlp.experts.1.up_proj", "have only 3 of 4 up_proj weights"),
        ("mtp.fc", "missing: eh_proj.weight"),
    ],
)
def test_published_models_that_lack_something(drop: str, message: str, tmp_path: Path) -> None:
    published(tmp_path / "m")
    file = tmp_path / "m" / "model-00001-of-00001.safetensors"
    kept = {key: value for key, value in mx.load(str(file)).items() if not key.startswith(drop)}  # type: ignore[union-attr]
    mx.eval(kept)
    mx.save_safetensors(str(file), kept)
    with pytest.raises(CheckpointError, match=message):
        mtp_of_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2 are not supported"),
        ({"model_type": "glm4_moe", "num_hidden_layers": 1}, "mlx-lm cannot use the config"),
    ],
)
def test_models_whose_layers_are_not_known(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"model.layers.1.enorm.weight": mx.zeros(3)})
    with pytest.raises(CheckpointError, match=message):
        mtp_of_model(tmp_path)
