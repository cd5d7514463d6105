"""Makes the golden files: logits of small random heads, by the reference implementations.

python -m venv v; v/bin/pip install torch==2.13.0 speculators==0.9.0; v/bin/python tests/golden/make.py

EAGLE-3 in speculators' layout is run by speculators itself. MTP layers are run with the decoder layers of transformers
(and by speculators, whose first step must agree). EAGLE-1 and the portable EAGLE-3 layout have no reference that runs
without a whole target, so `plain.py` is one. Of each head a .json keeps the config and the tensors' names and shapes,
a .safetensors the logits: of the first step at every position, and of four recycled steps after some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import draws
import numpy as np
import plain
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
LAYER: dict[str, Any] = {
    "hidden_size": draws.HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": draws.VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}

Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


def write(
    name: str,
    config: dict[str, Any],
    shapes: dict[str, Any],
    ones: tuple[str, ...] = (),
    minus_one: tuple[str, ...] = (),
    **logits: np.ndarray,
) -> None:
    """`ones` names the tensors that are not drawn but all one, `minus_one` those that are one less than drawn."""
    described = {"config": config, "tensors": {key: list(shape) for key, shape in sorted(shapes.items())}}
    described |= {key: list(names) for key, names in (("ones", ones), ("minus_one", minus_one)) if names}
    (HERE / f"{name}.json").write_text(json.dumps(described, indent=1) + "\n")
    save_file({key: np.ascontiguousarray(x, np.float32) for key, x in logits.items()}, HERE / f"{name}.safetensors")
    print(f"{name}: {', '.join(f'{key} {x.shape}' for key, x in logits.items())}")


def unroll(step: Step, logits: Step, recycled: Step, embed: np.ndarray, g: np.ndarray) -> dict[str, np.ndarray]:
    """Every step over the whole sequence: `step` gives outputs, of which come logits and the next features."""
    tokens, chains = draws.TOKENS, []
    first = logits(step(embed[tokens[1 : draws.LENGTH + 1]], g))
    for at in draws.CHAINS:
        features, chain = g[: at + 1], []
        for count in range(draws.STEPS + 1):
            h = step(embed[tokens[1 : at + 2 + count]], features)[-1:]
            chain.append(logits(h)[0])
            features = np.concatenate([features, recycled(h)])
        chains.append(chain[1:])
    return {"first": first, "chains": np.array(chains)}


def layer_shapes(name: str, width: int, config: dict[str, Any], normed: bool = True) -> dict[str, tuple[int, ...]]:
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.self_attn.q_proj.weight": (q, width),
        f"{name}.self_attn.k_proj.weight": (kv, width),
        f"{name}.self_attn.v_proj.weight": (kv, width),
        f"{name}.self_attn.o_proj.weight": (size, q),
        f"{name}.mlp.gate_proj.weight": (inner, size),
        f"{name}.mlp.up_proj.weight": (inner, size),
        f"{name}.mlp.down_proj.weight": (size, inner),
        f"{name}.post_attention_layernorm.weight": (size,),
    }
    if normed:
        shapes[f"{name}.input_layernorm.weight"] = (size,)
    attention_bias = config.get("attention_bias")
    if attention_bias or config.get("qkv_bias"):
        shapes |= {f"{name}.self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if attention_bias:
        shapes[f"{name}.self_attn.o_proj.bias"] = (size,)
    if config.get("qk_norm"):
        shapes |= {f"{name}.self_attn.{p}_norm.weight": (dim,) for p in "qk"}
    if config.get("mlp_bias"):
        shapes |= {f"{name}.mlp.{p}_proj.bias": (n,) for p, n in (("gate", inner), ("up", inner), ("down", size))}
    return shapes


def drawn(shapes: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: draws.draw(name, shape).astype(np.float64) for name, shape in shapes.items()}


def target(part: str) -> np.ndarray:
    return draws.target(part).astype(np.float64)


def last_hidden_state() -> np.ndarray:
    return plain.rms(draws.aux(-1).astype(np.float64), target("norm"), 1e-6)


def make_eagle(name: str, **fields: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LAYER, **fields}
    size = config["hidden_size"]
    shapes: dict[str, Any] = {"embed_tokens.weight": (draws.VOCAB, size), "fc.weight": (size, 2 * size)}
    if config.get("bias", True):
        shapes["fc.bias"] = (size,)
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{index}", size, config, normed=index > 0)
    weights = drawn(shapes)
    logits = lambda h: h @ target("lm_head").T  # noqa: E731
    embed = weights["embed_tokens.weight"]
    write(name, config, shapes, **unroll(plain.eagle(weights, config), logits, np.array, embed, last_hidden_state()))


def make_eagle3(
    name: str,
    first: str = "midlayer",
    layers: tuple[int, ...] = (1, 2, 2),
    recycle_norm: bool = False,
    prefix: str = "",
    leave_out: tuple[str, ...] = (),
    more: dict[str, tuple[int, ...]] = {},  # noqa: B006
    **fields: Any,
) -> None:
    """`layers` are those that the config names, as outputs from 0, or SafeAILab's choice for a target of six."""
    config = {"model_type": "llama", "draft_vocab_size": draws.DRAFT_VOCAB, **LAYER, **fields}
    size, read = config["hidden_size"], len(layers) * draws.HIDDEN
    shapes: dict[str, Any] = layer_shapes(first, 2 * size, config)
    for index in range(1, config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{index}", size, config)
    shapes |= {f"{first}.hidden_norm.weight": (size,), "norm.weight": (size,), "fc.weight": (size, read)}
    shapes |= {"lm_head.weight": (config["draft_vocab_size"], size)}
    if config["draft_vocab_size"] < draws.VOCAB:
        shapes |= {"d2t": (draws.DRAFT_VOCAB,), "t2d": (draws.VOCAB,)}
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (draws.HIDDEN,) for i in range(len(layers))}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (read,)
    if size != draws.HIDDEN:
        shapes["embed_tokens.weight"] = (draws.VOCAB, size)
    shapes = {key: shape for key, shape in shapes.items() if key not in leave_out} | more
    weights = drawn(shapes)
    embed = weights.get("embed_tokens.weight", target("embed_tokens"))
    states = [draws.aux(k).astype(np.float64) for k in layers]
    g = plain.features(weights, config, states) if "fc.weight" in shapes else last_hidden_state()
    norm = lambda h: plain.rms(h, weights.get("norm.weight"), config["rms_norm_eps"])  # noqa: E731
    logits = lambda h: norm(h) @ weights["lm_head.weight"].T  # noqa: E731
    ones: tuple[str, ...] = ()
    if config.get("norm_output") is False and first == "midlayer":  # SpecForge's meaning; a norm that nothing trained
        ones, logits = ("norm.weight",), lambda h: h @ weights["lm_head.weight"].T
    made = unroll(plain.eagle3(weights, config, first), logits, norm if recycle_norm else np.array, embed, g)
    write(name, config, {prefix + key: shape for key, shape in shapes.items()}, ones, **made)


NESTED = "eagle_aux_hidden_state_layer_ids"
PORTABLE: dict[str, dict[str, Any]] = {
    "safeailab-eagle3": {"architectures": ["LlamaForCausalLM"]},
    "specforge-eagle3.1": {"fc_norm": True, "norm_output": True, "rope_theta": 1e6},
    "specforge-no-norm": {"norm_output": False},
    "angelslim-qkv-bias": {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "draft_vocab_size": draws.VOCAB,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "sglang-narrow": {
        "layers": (0, 3),
        "hidden_size": 48,
        "target_hidden_size": 64,
        "norm_before_residual": True,
        "eagle_config": {NESTED: [0, 3], "use_aux_hidden_state": True},
        "norm_output": True,
        "recycle_norm": True,
    },
    "vllm-two-layers": {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "first": "layers.0",
        "prefix": "model.",
        "num_hidden_layers": 2,
        "norm_output": True,
        "recycle_norm": True,
        "fc_norm": True,
        "layers": (0, 1, 5),
        NESTED: [1, 2, 6],
    },
    "sliding": {"use_sliding_window": True, "sliding_window": 4, "norm_before_residual": False},
    "modelopt-yarn": {
        "first": "layers.0",
        "leave_out": ("t2d",),
        "layers": (1, 2, 3),
        "rope_scaling": YARN,
        "eagle_config": {
            NESTED: [1, 2, 3],
            "use_aux_hidden_state": True,
            "use_mtp_layernorm": False,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    },
    "modelopt-without-aux": {
        "first": "layers.0",
        "leave_out": ("fc.weight", "layers.0.hidden_norm.weight", "t2d"),
        "eagle_config": {"use_aux_hidden_state": False},
    },
    "modelopt-fewer-norms": {
        "first": "layers.0",
        "leave_out": ("layers.0.input_layernorm.weight", "norm.weight", "t2d"),
        "layers": (1, 2, 3),
        "eagle_config": {NESTED: [1, 2, 3], "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False},
    },
    "deepspec-eagle3": {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "first": "layers.0",
        "layers": (0, 1, 2, 3, 5),
        "target_layer_ids": [0, 1, 2, 3, 5],
        "num_target_layers": 6,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "draft_vocab_size": draws.VOCAB,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "more": {
            **{f"layers.0.self_attn.{part}_norm.weight": (LAYER["head_dim"],) for part in "qk"},
            "embed_tokens.weight": (draws.VOCAB, draws.HIDDEN),
        },
    },
}
"""The arguments of `make_eagle3` for each head in the portable layout."""


def make_portable() -> None:
    make_eagle("eagle")
    make_eagle("eagle-qkv-bias", bias=False, qkv_bias=True, num_hidden_layers=2, rope_theta=5000.0)
    for name, fields in PORTABLE.items():
        make_eagle3(name, **{"architectures": ["LlamaForCausalLMEagle3"], **fields})


def make_speculators(name: str, layer: str = "llama", ids: tuple[int, ...] = (1, 2, 4), **fields: Any) -> None:
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    of_layer = {key: fields.pop(key) for key in list(fields) if key in LAYER or key in LAYER_ONLY}
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[layer](**{**LAYER, **of_layer})
    kind._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=kind,
        eagle_aux_hidden_state_layer_ids=list(ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{"draft_vocab_size": draws.DRAFT_VOCAB, **fields},
    )
    model = Eagle3DraftModel(config).float().eval()
    state = {key: torch.tensor(draws.draw(key, x.shape)) for key, x in model.state_dict().items()}
    model.load_state_dict(state)
    written, shapes = saved(model)
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out.detach().numpy()[0]))
    states = np.concatenate([draws.aux(k - 1) for k in ids], axis=-1)
    with torch.no_grad():
        model(
            hidden_states=torch.tensor(states)[None],
            input_ids=torch.tensor(draws.TOKENS[1 : draws.LENGTH + 1])[None],
            document_ids=torch.zeros(1, draws.LENGTH, dtype=torch.long),
            ttt_steps=draws.STEPS + 1,
        )
    # A window is counted from the position that a chain starts at in training, from its own when drafting.
    chains = {"chains": np.stack([np.stack([x[at] for x in seen[1:]]) for at in draws.CHAINS])}
    write(name, written, shapes, first=seen[0], **({} if of_layer.get("layer_types") else chains))


LAYER_ONLY = (
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)


def saved(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json and the tensors' shapes, as the model writes itself."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    return config, {key: x.shape for key, x in tensors.items()}


def make_all_speculators() -> None:
    make_speculators("speculators")
    make_speculators("speculators-residual", norm_before_residual=True, draft_vocab_size=draws.VOCAB)
    make_speculators("speculators-norm-before-fc", norm_before_fc=True, attention_bias=True, mlp_bias=True)
    make_speculators("speculators-3.1", layer="qwen3", fc_norm=True, norm_output=True, norm_before_residual=True)
    make_speculators("speculators-five", layer="qwen3", ids=(1, 2, 3, 4, 6), attention_bias=True)
    make_speculators("speculators-two-layers", layer="qwen3", num_hidden_layers=2, norm_output=True)
    make_speculators("speculators-llama3", rope_parameters=LLAMA3, norm_before_residual=True)
    make_speculators("speculators-yarn", rope_parameters={**YARN, "rope_theta": 1000.0})
    make_speculators(
        "speculators-sliding",
        layer="qwen3",
        num_hidden_layers=2,
        sliding_window=4,
        use_sliding_window=True,
        max_window_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )


def make_torch() -> None:
    """A file of torch.save's with what heads' files have: shared storages, views, half precision, a module's state."""
    import torch

    numbers = torch.arange(12, dtype=torch.float32)
    module = torch.nn.Linear(2, 3, bias=False)
    module.weight.data = numbers[:6].reshape(3, 2)
    state = module.state_dict()
    state["half"], state["brain"] = numbers.half(), (numbers / 4).bfloat16()
    state["turned"], state["cut"] = numbers.reshape(3, 4).t(), numbers[3:7]
    state["d2t"], state["t2d"] = torch.arange(5), torch.tensor([True, False, True])
    state["empty"], state["scalar"] = torch.zeros(0, 4), torch.tensor(2.5)
    state["parameter"] = torch.nn.Parameter(numbers[:2])
    torch.save(state, HERE / "torch.bin")


if __name__ == "__main__":
    parts = sys.argv[1:] or ["portable", "speculators", "mtp", "torch"]
    if "portable" in parts:
        make_portable()
    if "speculators" in parts:
        make_all_speculators()
    if "mtp" in parts:
        from make_mtp import make_all_mtp

        make_all_mtp()
    if "torch" in parts:
        make_torch()
