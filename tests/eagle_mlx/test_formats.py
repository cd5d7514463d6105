from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import LlamaConfig, Qwen3Config

from eagle_mlx.errors import CheckpointError, HeadError, HeadWarning, OutputError
from eagle_mlx.formats.fields import LAYER_DEFAULTS
from eagle_mlx.formats.tensors import HeadFolder, weights_of
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle3 import Eagle3Head, save_eagle3
from eagle_mlx.heads.eagle3.formats import load_eagle3, load_speculators, save_speculators
from tests.eagle_mlx import test_heads_golden as golden
from tests.fakes import tiny_head, tiny_target

TENSORS = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
    *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
}


def saved(folder: Path, draft_vocab: int | None = 48, **options: Any) -> Eagle3Head:
    head = tiny_head(tiny_target(), draft_vocab=draft_vocab)
    save_eagle3(head, folder, target_name="tiny", **options)
    return head


def rewrite(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    change(tensors)
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


@pytest.mark.parametrize("draft_vocab", [None, 48])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_round_trip_is_exact(tmp_path: Path, draft_vocab: int | None, dtype: mx.Dtype) -> None:
    head = saved(tmp_path / "a", draft_vocab, dtype=dtype)
    again = load_head(tmp_path / "a")
    assert again.config == head.config
    assert (again.token_ids is None) == (draft_vocab is None)
    if again.token_ids is not None and head.token_ids is not None:
        assert mx.array_equal(again.token_ids, head.token_ids)
    for name, value in weights_of(head).items():
        assert mx.array_equal(weights_of(again)[name].astype(dtype), value.astype(dtype)), name
    save_eagle3(again, tmp_path / "b", target_name="tiny", dtype=dtype)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_folder_is_what_other_engines_read(tmp_path: Path) -> None:
    head = saved(tmp_path / "h", extra={"step": 7})
    config = json.loads((tmp_path / "h" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False
    assert config["norm_before_residual"] is False
    assert (config["vocab_size"], config["draft_vocab_size"], config["target_hidden_size"]) == (128, 48, 32)
    layers = list(head.config.aux_layers)
    ids = "eagle_aux_hidden_state_layer_ids"
    assert config["eagle_config"] == {ids: layers, "use_aux_hidden_state": True}
    assert config[ids] == [k + 1 for k in layers]
    assert config["eagle_mlx"] == {"target": "tiny", "step": 7}
    tensors = mx.load(str(tmp_path / "h" / "model.safetensors"))
    assert isinstance(tensors, dict)
    assert set(tensors) == TENSORS | {"d2t", "t2d"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (mx.int64, mx.bool_)
    assert tensors["fc.weight"].dtype == mx.bfloat16
    kept = np.arange(48) + np.array(tensors["d2t"])
    assert np.array_equal(np.flatnonzero(np.array(tensors["t2d"])), kept)
    assert np.array_equal(np.array(head.token_ids), kept)


def test_a_head_for_the_whole_vocabulary_has_no_maps(tmp_path: Path) -> None:
    saved(tmp_path / "h", None)
    tensors = mx.load(str(tmp_path / "h" / "model.safetensors"))
    assert set(tensors) == TENSORS


def test_names_with_the_prefix_of_a_model(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")

    def prefix(tensors: dict[str, mx.array]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    rewrite(tmp_path / "h", prefix)
    again = load_head(tmp_path / "h")
    assert mx.allclose(again.fc.weight, head.fc.weight, atol=1e-2)


def test_layer_ids_of_either_kind(tmp_path: Path) -> None:
    layers = saved(tmp_path / "h").config.aux_layers
    reconfigure(tmp_path / "h", eagle_config="gone")
    assert load_head(tmp_path / "h").config.aux_layers == layers
    reconfigure(tmp_path / "h", eagle_aux_hidden_state_layer_ids="gone")
    with pytest.raises(CheckpointError, match="does not name the layers"):
        load_head(tmp_path / "h")
    assert load_eagle3(HeadFolder.read(tmp_path / "h", target_layers=28)).config.aux_layers == (1, 13, 24)
    reconfigure(tmp_path / "h", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})
    assert load_head(tmp_path / "h").config.aux_layers == (0, 2, 3)
    reconfigure(tmp_path / "h", eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    with pytest.raises(CheckpointError, match="different layers"):
        load_head(tmp_path / "h")


def test_configs_of_newer_transformers(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    reconfigure(tmp_path / "h", rope_theta="gone", rope_scaling="gone", rope_parameters=rope)
    config = load_head(tmp_path / "h").config
    assert config.rope_theta == 5e5
    assert config.rope_scaling is not None
    assert config.rope_scaling["rope_type"] == "llama3"


FULL, SLIDING = {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
BY_TYPE = {"full_attention": FULL, "sliding_attention": SLIDING}


def test_rope_parameters_by_type_of_layer(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    folder = tmp_path / "h"
    reconfigure(folder, rope_theta="gone", rope_scaling="gone", rope_parameters=BY_TYPE)
    assert (load_head(folder).config.rope_theta, load_head(folder).config.rope_scaling) == (5e5, None)
    reconfigure(folder, rope_theta=3.0)
    assert load_head(folder).config.rope_theta == 5e5, "as in transformers, the inner one stands before the other"
    reconfigure(folder, rope_parameters={"full_attention": {"rope_type": "default"}})
    assert load_head(folder).config.rope_theta == 3.0
    reconfigure(folder, rope_parameters=BY_TYPE, use_sliding_window=True, sliding_window=8)
    config = load_head(folder).config
    assert (config.rope_theta, config.rope_scaling) == (7.0, {"rope_type": "linear", "factor": 2.0})


def test_speculators_turns_all_layers_as_the_sliding_ones(tmp_path: Path) -> None:
    target, head = tiny_target(), tiny_head(tiny_target(), draft_vocab=48)
    head.attach(target)
    save_speculators(head, tmp_path / "h")
    layer = json.loads((tmp_path / "h" / "config.json").read_text())["transformer_layer_config"]
    reconfigure(tmp_path / "h", transformer_layer_config=layer | {"rope_parameters": BY_TYPE})
    config = load_head(tmp_path / "h").config
    assert (config.rope_theta, config.rope_scaling) == (7.0, {"rope_type": "linear", "factor": 2.0})


def test_fields_that_nobody_here_knows_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    reconfigure(tmp_path / "h", mask_token_id=9, block_size=16, markov_rank=256, colour=None, blue=False, _shade={})
    with pytest.warns(HeadWarning, match=r"config\.json sets block_size, markov_rank, mask_token_id, not known here"):
        load_head(tmp_path / "h")


def test_a_type_of_speculator_that_is_null_is_none(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    reconfigure(tmp_path / "h", speculators_model_type=None)
    assert isinstance(load_head(tmp_path / "h"), Eagle3Head)
    with pytest.raises(CheckpointError, match="has speculators_model_type None; it must be eagle3"):
        load_speculators(HeadFolder.read(tmp_path / "h"))


@pytest.mark.parametrize("name", [name for name in golden.NAMES if not golden.published(name)])
def test_what_trainers_write_is_known(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        golden.loaded(golden.written(tmp_path / "h", name), name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.update(extra=mx.zeros(3)), "not known to this format: extra"),
        (lambda t: t.update({"fc.weight": mx.zeros((3, 4))}), r"fc.weight has shape \(3, 4\), expected \(32, 96\)"),
        (lambda t: t.pop("d2t"), r"lacks d2t, but its draft vocabulary \(48\)"),
        (lambda t: t.update(d2t=t["d2t"][:9]), r"d2t .* has shape \(9,\), expected \(48,\)"),
        (lambda t: t.update(d2t=t["d2t"] + 1000), "ascending ids of a vocabulary of 128"),
        (lambda t: t.update(t2d=mx.zeros(128, mx.bool_)), "t2d and d2t"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    saved(tmp_path / "h")
    rewrite(tmp_path / "h", change)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "h")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "gone"}, "lacks hidden_size"),
        ({"num_attention_heads": "four"}, "not usable"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "not known to this format: fc.weight"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm to True, which is not impl"),
        ({"eagle_config": {"use_colour": True}}, "eagle_config.use_colour to True, which is not known"),
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu'"),
        ({"logit_scale": 0.5}, "sets logit_scale to 0.5"),
        ({"eagle_aux_injection_mode": "banded_mix_fc"}, "sets eagle_aux_injection_mode to 'banded_mix_fc'"),
        ({"quantization_config": {"bits": 4}}, "sets quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "type longrope is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 2}}, "yarn with attention_factor"),
        ({"rope_scaling": {"type": "linear"}}, "linear lacks factor"),
        (
            {"rope_parameters": {"main": {}, "rope_theta": 3.0}},
            "RoPE parameters for main, rope_theta are not",
        ),
        ({"rope_parameters": {"sliding_attention": {}}}, "the RoPE parameters lack full_attention"),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {}}}, "lack full_attention"),
        ({"rope_parameters": {"full_attention": FULL}, **TWO_KINDS}, "lack full_attention or sliding_attention"),
        ({"rope_parameters": BY_TYPE, **TWO_KINDS}, "RoPE parameters differ by type of layer"),
        ({"use_sliding_window": True}, "sliding_window is not given"),
        ({"layer_types": ["chunked_attention"]}, "layer_types name chunked_attention"),
        ({"fc_norm": True}, "missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ({"norm_before_fc": True}, "missing: input_norm.weight"),
        ({"fc_norm": True, "norm_before_fc": True}, "both set"),
        ({"attention_bias": True}, "missing: midlayer.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "missing: midlayer.mlp.down_proj.bias"),
        ({"num_hidden_layers": 2}, "missing: layers.1.input_layernorm.weight"),
        ({"eagle_config": "gone", "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "embedding's output"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path / "h")
    reconfigure(tmp_path / "h", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "h")


def test_fields_that_change_nothing_are_taken(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    same = {"logit_scale": 1.0, "partial_rotary_factor": 1.0, "parallel_draft_step": 1, "parallel_drafting": False}
    reconfigure(tmp_path / "h", **same, hidden_act="swish", eagle_aux_injection_mode="fused_fc", is_causal=True)
    load_head(tmp_path / "h")


def test_attention_heads_have_the_hidden_size_between_them_unless_told(tmp_path: Path) -> None:
    config = replace(tiny_head(tiny_target()).config, head_dim=8)
    save_eagle3(Eagle3Head(config), tmp_path / "h", target_name="tiny")
    reconfigure(tmp_path / "h", head_dim="gone")
    assert load_head(tmp_path / "h").config.head_dim == 8


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    weights = tmp_path / "h" / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_head(tmp_path / "h")
    weights.write_bytes(b"not a checkpoint at all, just some text that is long enough")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_head(tmp_path / "h")
    weights.unlink()
    (tmp_path / "h" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a zip file from torch.save"):
        load_head(tmp_path / "h")
    (tmp_path / "h" / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        load_head(tmp_path / "h")
    (tmp_path / "h" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_head(tmp_path / "h")
    (tmp_path / "h" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_head(tmp_path / "h")


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    saved(tmp_path / "h", None)
    before = (tmp_path / "h" / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        saved(tmp_path / "h")
    assert (tmp_path / "h" / "model.safetensors").read_bytes() == before
    saved(tmp_path / "h", 48, overwrite=True)
    assert load_head(tmp_path / "h").config.draft_vocab_size == 48
    assert [p.name for p in tmp_path.iterdir()] == ["h"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def on_full_disk(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return opened(Path("/dev/full") if self.suffix == ".safetensors" else self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", on_full_disk)
    with pytest.raises(OutputError, match="No space left"):
        saved(tmp_path / "h")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_may_not_be_read_are_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "h")
    opened = Path.open

    def refusing(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\); make it readable"):
        load_head(tmp_path / "h")


def test_a_head_is_checked_against_its_target(tmp_path: Path) -> None:
    saved(tmp_path / "h")
    assert isinstance(load_head(tmp_path / "h", tiny_target()), Eagle3Head)
    with pytest.raises(
        HeadError, match=rf"head {tmp_path}/h expects a target of hidden size 32 but the target has 64;"
    ):
        load_head(tmp_path / "h", tiny_target(hidden=64))
    with pytest.raises(HeadError, match="vocabulary 128 but the target has 256"):
        load_head(str(tmp_path / "h"), tiny_target(vocab=256))
    with pytest.raises(HeadError, match=r"/h reads layers \(0, 2, 3\) but the target has 2 layers"):
        load_head(tmp_path / "h", tiny_target(layers=2))


@pytest.mark.parametrize(("name", "config"), [("llama", LlamaConfig), ("qwen3", Qwen3Config)])
def test_fields_that_a_config_leaves_out_are_those_of_transformers(name: str, config: Callable[[], Any]) -> None:
    defaults = config()
    assert {key: getattr(defaults, key) for key in LAYER_DEFAULTS[name]} == LAYER_DEFAULTS[name]
