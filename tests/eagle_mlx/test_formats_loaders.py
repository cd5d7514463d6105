"""What other loaders require of a folder that is written here: names, shapes, types and fields.

Each requirement is a fact about a loader: SGLang's `LlamaForCausalLMEagle` and `LlamaForCausalLMEagle3`, vLLM's
`Eagle3LlamaForCausalLM` and speculators' `Eagle3DraftModel` and `MTPDraftModel`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads.eagle import save_eagle
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.eagle3.formats import save_speculators
from eagle_mlx.heads.mtp.formats import save_speculators_mtp
from tests.eagle_mlx.heads import SHAPE, eagle, eagle3, mtp
from tests.fakes import tiny_target

V, H, VD = 64, 32, 40
INNER, Q, KV = 64, 4 * 16, 2 * 16
TARGET = tiny_target(vocab=V)
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Written:
    config: dict[str, Any]
    tensors: dict[str, mx.array]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.tensors.items()}


def write(save: Any, head: Any, folder: Path, **options: Any) -> Written:
    head.attach(TARGET)
    save(head, folder, **options)
    return Written(json.loads((folder / "config.json").read_text()), read_tensors(folder))


def layer(prefix: str, width: int, inner: int = INNER, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return a Llama layer's tensors; its attention is `width` wide."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (Q, width),
        f"{prefix}.self_attn.k_proj.weight": (KV, width),
        f"{prefix}.self_attn.v_proj.weight": (KV, width),
        f"{prefix}.self_attn.o_proj.weight": (H, Q),
        f"{prefix}.mlp.gate_proj.weight": (inner, H),
        f"{prefix}.mlp.up_proj.weight": (inner, H),
        f"{prefix}.mlp.down_proj.weight": (H, inner),
        **{f"{prefix}.{name}.weight": shape for name, shape in more.items()},
    }


FIRST = {"hidden_norm": (H,), "input_layernorm": (H,), "post_attention_layernorm": (H,)}
AROUND = {"fc.weight": (H, 3 * H), "norm.weight": (H,)}


@pytest.mark.parametrize("draft_vocab", [None, VD])
def test_eagle_3_for_sglang_and_vllm(draft_vocab: int | None, tmp_path: Path) -> None:
    got = write(save_eagle3, eagle3(TARGET, draft_vocab=draft_vocab), tmp_path / "h")
    maps = {} if draft_vocab is None else {"d2t": (VD,), "t2d": (V,)}
    head = {"lm_head.weight": (draft_vocab or V, H)}
    assert got.shapes == AROUND | head | maps | layer("midlayer", 2 * H, **FIRST)
    config = got.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama", "what AutoConfig makes a LlamaConfig of"
    assert config["num_hidden_layers"] == 1, "the only number that older SGLang takes"
    assert config["tie_word_embeddings"] is False, "else SGLang takes the embedding for the output projection"
    assert config["draft_vocab_size"] == (draft_vocab or V), "else SGLang takes the target's output projection"
    assert (config["vocab_size"], config["hidden_size"], config["target_hidden_size"]) == (V, H, H)
    assert config["norm_before_residual"] is False, "left out it is read as either"
    assert config["eagle_config"] == {IDS: [0, 2, 3], "use_aux_hidden_state": True}, "SGLang: outputs, from 0"
    assert config[IDS] == [1, 3, 4], "vLLM: one higher"
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"):
        assert config[name] is not None
    assert config["hidden_act"] == "silu"
    assert config["torch_dtype"] == "bfloat16"


def test_draft_vocabularies_as_all_loaders_read_them(tmp_path: Path) -> None:
    for name, save in (("portable", save_eagle3), ("speculators", save_speculators)):
        head = eagle3(TARGET, draft_vocab=VD)
        got = write(save, head, tmp_path / name)
        d2t, t2d = got.tensors["d2t"], got.tensors["t2d"]
        assert (d2t.dtype, t2d.dtype) == (mx.int64, mx.bool_)
        kept = mx.arange(VD) + d2t
        assert bool(mx.all(kept[1:] > kept[:-1])), "offsets, to ascending ids"
        assert kept.tolist() == [i for i, drafted in enumerate(t2d.tolist()) if drafted]
        assert head.token_ids is not None
        assert kept.tolist() == head.token_ids.tolist()


@pytest.mark.parametrize(
    ("fields", "tensors", "flags"),
    [
        ({"norm_before_residual": True}, {}, {"norm_before_residual": True}),
        ({"norm_before_fc": True}, {"input_norm.weight": (3 * H,)}, {"norm_before_fc": True}),
        ({"fc_norm": True}, {f"fc_norm.{i}.weight": (H,) for i in range(3)}, {"fc_norm": True}),
        ({"norm_output": True}, {}, {"norm_output": True}),
        ({"own_embedding": True}, {"embed_tokens.weight": (V, H)}, {}),
        ({"use_aux_hidden_state": True, "aux_layers": (0, 1, 2, 3, 1)}, {"fc.weight": (H, 5 * H)}, {}),
        (
            {"attention_bias": True},
            {f"LAYER.self_attn.{n}_proj.bias": (s,) for n, s in zip("qkvo", (Q, KV, KV, H), strict=True)},
            {"attention_bias": True},
        ),
        ({"qk_norm": True}, {f"LAYER.self_attn.{n}_norm.weight": (16,) for n in "qk"}, {}),
    ],
)
def test_flags_and_their_tensors_in_both_layouts(
    fields: dict[str, Any], tensors: dict[str, tuple[int, ...]], flags: dict[str, Any], tmp_path: Path
) -> None:
    for name, save, prefix in (("portable", save_eagle3, "midlayer"), ("speculators", save_speculators, "layers.0")):
        got = write(save, eagle3(TARGET, **fields), tmp_path / name)
        wanted = {key.replace("LAYER", prefix): shape for key, shape in tensors.items()}
        plain = AROUND | {"lm_head.weight": (V, H)} | layer(prefix, 2 * H, **FIRST)
        plain |= {"embed_tokens.weight": (V, H)} if name == "speculators" else {}
        assert got.shapes == plain | wanted
        written_config = {**got.config, **got.config.get("transformer_layer_config", {})}
        assert {key: written_config[key] for key in flags} == flags


def test_a_head_narrower_than_its_target(tmp_path: Path) -> None:
    got = write(save_eagle3, eagle3(TARGET, hidden_size=24, own_embedding=True), tmp_path / "h")
    assert got.shapes["fc.weight"] == (24, 3 * H)
    assert got.shapes["embed_tokens.weight"] == (V, 24)
    assert (got.config["hidden_size"], got.config["target_hidden_size"]) == (24, H)


def test_eagle_3_for_speculators(tmp_path: Path) -> None:
    head = eagle3(TARGET, draft_vocab=VD)
    options: dict[str, Any] = {"target_name": "mlx/model-4bit", "base_model": "org/model", "depth": 5}
    options["target_architectures"] = ["Qwen3ForCausalLM"]
    got = write(save_speculators, head, tmp_path / "h", **options)
    assert got.shapes == (
        AROUND
        | {"lm_head.weight": (VD, H), "embed_tokens.weight": (V, H), "d2t": (VD,), "t2d": (V,)}
        | layer("layers.0", 2 * H, **FIRST)
    )
    config = got.config
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_version"]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (VD, H)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    assert [config[name] for name in flags] == [False] * 5, "norm_before_residual left out would be yes"
    assert config[IDS] == [1, 3, 4], "one higher than the layer whose output is read"
    assert "eagle_config" not in config
    assert config["tie_word_embeddings"] is False
    inner = config["transformer_layer_config"]
    assert inner["model_type"] == "llama"
    assert (inner["hidden_size"], inner["vocab_size"], inner["num_hidden_layers"]) == (H, V, 1)
    assert inner["rope_parameters"]["rope_theta"] == 10000.0
    assert config["speculators_config"] == proposal("eagle3", 5)


def proposal(algorithm: str, depth: int) -> dict[str, Any]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": depth, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": "org/model", "architectures": ["Qwen3ForCausalLM"]},
    }


def test_several_layers(tmp_path: Path) -> None:
    head = eagle3(TARGET, num_hidden_layers=2, windows=(None, 6))
    second = layer("layers.1", H, input_layernorm=(H,), post_attention_layernorm=(H,))
    for name, save, first in (("portable", save_eagle3, "midlayer"), ("speculators", save_speculators, "layers.0")):
        got = write(save, head, tmp_path / name)
        inner = got.config.get("transformer_layer_config", got.config)
        assert got.shapes.items() >= (layer(first, 2 * H, **FIRST) | second).items()
        assert inner["num_hidden_layers"] == 2
        assert inner["layer_types"] == ["full_attention", "sliding_attention"]
        assert inner["sliding_window"] == 6


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1_for_safeailab_and_sglang(bias: bool, tmp_path: Path) -> None:
    got = write(save_eagle, eagle(TARGET, bias=bias), tmp_path / "h")
    assert got.shapes == {
        "embed_tokens.weight": (V, H),
        "fc.weight": (H, 2 * H),
        **({"fc.bias": (H,)} if bias else {}),
        **layer("layers.0", H, SHAPE["intermediate_size"], post_attention_layernorm=(H,)),
    }
    assert got.config["architectures"] == ["LlamaForCausalLMEagle"]
    assert got.config["model_type"] == "llama"
    assert got.config["bias"] is bias, "left out SafeAILab reads yes"
    assert got.config["num_hidden_layers"] == 1
    assert got.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("model", ["qwen3", "qwen3_next"])
def test_mtp_for_speculators(model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_name": "mlx/model-4bit", "base_model": "org/model", "dtype": mx.float32}
    options["target_architectures"] = ["Qwen3ForCausalLM"]
    head = mtp(TARGET, model_type=model, norm_output=True)
    got = write(save_speculators_mtp, head, tmp_path / "h", **options)
    golden = json.loads((Path(__file__).parents[1] / "golden" / f"speculators-mtp-{model}.json").read_text())
    assert got.tensors.keys() == golden["tensors"].keys(), "the names that speculators itself writes"
    assert {name: len(shape) for name, shape in got.shapes.items()} == {
        name: len(shape) for name, shape in golden["tensors"].items()
    }
    assert got.shapes["mtp_layers.0.input_proj.weight"] == (H, 2 * H)
    for name in ("architectures", "speculators_model_type", "num_nextn_predict_layers", "tie_word_embeddings"):
        assert got.config[name] == golden["config"][name]
    assert got.config["transformer_layer_config"]["model_type"] == model
    assert got.config["speculators_config"] == proposal("mtp", 3)
    plain = {"qwen3": 0.0, "qwen3_next": 1.0}[model]
    assert mx.allclose(got.tensors["mtp_layers.0.final_layernorm.weight"] + plain, head.norm.weight), "zero-centred"
