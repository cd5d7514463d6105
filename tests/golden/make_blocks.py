"""Makes the golden files of block drafters: logits of small random heads, by the packages that define them.

python -m venv v; v/bin/pip install torch==2.13.0 dflash==0.1.0 speculators==0.9.0
HF_HUB_OFFLINE=1 v/bin/python tests/golden/make_blocks.py

z-lab's layout is run by `dflash`, speculators' by `speculators`. No package runs DeepSpec's heads for Gemma 4: their
layer is written out here, from norms, MLP and angles of transformers. Of each head a .json keeps the config and the
tensors' names and shapes, a .safetensors the logits of five blocks [5, slots, Vd]. For DSpark, the tokens before each
slot are those of the text, and the logits of the confidence head [5, slots] are kept too.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import draws
import numpy as np
import speculators.models.dflash.core as core
import speculators.models.peagle.core as peagle_core
import torch
from dflash.model import DFlash2DraftModel as ZLab2
from dflash.model import DFlashDraftModel as ZLab
from safetensors.numpy import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import eager
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextMLP,
    Gemma4TextRotaryEmbedding,
)
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb as rotate

HERE = Path(__file__).parent / "blocks"
PEAGLE = Path(__file__).parent / "peagle"
SLOTS, LAYERS = 5, [1, 2, 4]
LAYER: dict[str, Any] = {
    "hidden_size": draws.HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": draws.VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
FULL: dict[str, Any] = {
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
}
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
OUTPUT = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
CONTEXT = torch.tensor(np.concatenate([draws.block_context(k) for k in LAYERS], axis=-1))[None]
TOKENS = torch.tensor(draws.BLOCK_TOKENS)[None]
EMBEDDING, PROJECTION = (torch.tensor(draws.target(part)) for part in ("embed_tokens", "lm_head"))


def fill(model: torch.nn.Module) -> dict[str, list[int]]:
    """Draw all weights that a file would hold, and return their shapes."""
    shapes = {}
    for name, value in model.named_parameters():
        if not name.startswith(("embed_tokens", "verifier")) and not (
            name.startswith("lm_head") and len(value) == draws.VOCAB
        ):
            value.data = torch.tensor(draws.draw(name.replace("codebook.weight", "codebook"), value.shape))
            shapes[name] = list(value.shape)
    return shapes


def keep(name: str, config: dict[str, Any], shapes: dict[str, list[int]], **outputs: np.ndarray) -> None:
    HERE.mkdir(exist_ok=True)
    (HERE / f"{name}.json").write_text(json.dumps({"config": config, "tensors": shapes}, indent=1) + "\n")
    save_file(
        {key: np.ascontiguousarray(value, np.float32) for key, value in outputs.items()}, HERE / f"{name}.safetensors"
    )


def zlab(name: str, kind: dict[str, Any], **more: Any) -> None:
    own = {"mask_token_id": 255, "target_layer_ids": LAYERS, **more.pop("nested", {})}
    config = {**LAYER, **kind, **more, "num_target_layers": 6, "block_size": SLOTS, "dflash_config": own}
    second = "selector_rank" in own
    model = (ZLab2 if second else ZLab)(Qwen3Config(**config)).float().eval()
    shapes, blocks, paths = fill(model), [], []
    with torch.no_grad():
        for at in draws.ANCHORS:
            block = torch.full((1, SLOTS), 255)
            block[0, 0] = TOKENS[0, at]
            embedded = EMBEDDING[block] * own.get("input_embedding_scale", 1.0)
            h = model(torch.arange(at + SLOTS)[None], noise_embedding=embedded, target_hidden=CONTEXT[:, :at])
            blocks.append(model.compute_logits(h, lambda x: x @ PROJECTION.T)[0].numpy())
            if second:
                paths.append(model.propose(h[:, 1:], block[:, 0], lambda x: x @ PROJECTION.T, 0.0)[0][0].numpy())
    shapes = {key.replace("codebook.weight", "codebook"): shape for key, shape in shapes.items()}
    outputs = {"path": np.stack(paths)} if second else {}
    written = {"architectures": [f"DFlash{2 if second else ''}DraftModel"], "model_type": "qwen3", **config}
    keep(name, written, shapes, logits=np.stack(blocks), **outputs)


def by_speculators(name: str, kind: dict[str, Any], draft_vocab: int | None = None, **more: Any) -> None:
    spark = name.startswith("dspark")
    proposal = GreedyTokenProposalConfig(speculative_tokens=SLOTS - 1)
    verifier = VerifierConfig(name_or_path="org/model", architectures=["Qwen3ForCausalLM"])
    spoken = SpeculatorsConfig(
        algorithm=name[:6], proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    layer = Qwen3Config(**LAYER, **kind)
    layer._attn_implementation = "eager"
    config = (DSparkSpeculatorConfig if spark else DFlashSpeculatorConfig)(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab or draws.VOCAB,
        block_size=SLOTS,
        aux_hidden_state_layer_ids=[k + 1 for k in LAYERS],
        mask_token_id=255,
        speculators_config=spoken,
        **more,
    )
    model = (DSparkDraftModel if spark else DFlashDraftModel)(config).float().eval()
    if draft_vocab:
        kept = torch.zeros(draws.VOCAB, dtype=torch.bool)
        kept[torch.tensor(draws.KEPT)] = True
        model.load_vocab_mappings(kept, torch.tensor(draws.KEPT - np.arange(draft_vocab)))
    shapes = fill(model)
    model.embed_tokens.weight.data = EMBEDDING
    if not draft_vocab:
        model.lm_head.weight.data = PROJECTION
    count = len(draws.ANCHORS)
    core.select_anchors = lambda *_: (torch.tensor(draws.ANCHORS), torch.ones(count, dtype=torch.bool))
    outputs = {}
    with torch.no_grad():
        ones, zeros = torch.ones_like(TOKENS), torch.zeros_like(TOKENS)
        last = torch.zeros(1, TOKENS.shape[1], draws.HIDDEN)
        h, logits, *_ = model._backbone_forward(CONTEXT, TOKENS, ones, last, zeros, max_anchors=count)
        h, logits = h.view(count, SLOTS, -1), logits.view(count, SLOTS, -1)
        if spark and model.markov_head is not None:
            texts = torch.stack([TOKENS[0, at : at + SLOTS] for at in draws.ANCHORS])
            before = texts if config.sample_from_anchor else torch.cat([texts[:, :1], texts[:, :-1]], dim=1)
            logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=h)
            read = torch.cat([h, model.markov_head.prev_embeddings(before)], dim=-1)
            outputs["confidence"] = model.confidence_head(read).numpy()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        held = {key: list(value.shape) for key, value in load_file(Path(folder) / "model.safetensors").items()}
    assert shapes.items() <= held.items(), (shapes, held)
    keep(f"speculators-{name}", written, held, logits=logits.numpy(), **outputs)


def peagle(name: str, draft_vocab: int | None = None, **more: Any) -> None:
    """Logits [5, 4, Vd] of four tokens after five positions, whose next tokens are those of the text."""
    kept = {key: value for key, value in LAYER.items() if key != "rope_theta"}
    layer = LlamaConfig(**kept, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=4)
    verifier = VerifierConfig(name_or_path="org/model", architectures=["Qwen3ForCausalLM"])
    spoken = SpeculatorsConfig(
        algorithm="peagle", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab or draws.VOCAB,
        mask_token_id=255,
        eagle_aux_hidden_state_layer_ids=[k + 1 for k in LAYERS],
        speculators_config=spoken,
        **more,
    )
    model = PEagleDraftModel(config).float().eval()
    if draft_vocab:
        kept_ids = torch.zeros(draws.VOCAB, dtype=torch.bool)
        kept_ids[torch.tensor(draws.KEPT)] = True
        model.load_vocab_mappings(kept_ids, torch.tensor(draws.KEPT - np.arange(draft_vocab)))
    for key, value in model.named_parameters():
        if not key.startswith("verifier"):
            value.data = torch.tensor(draws.draw(key, value.shape))
    caught: dict[str, Any] = {}
    model.lm_head.register_forward_hook(lambda module, given, out: caught.update(logits=out))
    sample = peagle_core.generate_cod_sample_indices
    peagle_core.generate_cod_sample_indices = lambda **given: caught.setdefault("places", sample(**given))
    following, ones = TOKENS.roll(-1, dims=1), torch.ones_like(TOKENS)
    with torch.no_grad():
        model(
            hidden_states=CONTEXT,
            input_ids=following,
            document_ids=torch.zeros_like(TOKENS),
            loss_mask=ones,
            verifier_last_hidden_states=torch.zeros(1, TOKENS.shape[1], draws.HIDDEN),
            num_depths=4,
            down_sample_ratio=1.0,
            down_sample_ratio_min=1.0,
            loss_config={"kl_div": (eager.kl_div_loss, 1.0)},
        )
    peagle_core.generate_cod_sample_indices = sample
    anchors, depths = caught["places"]
    where = {(int(a), int(d)): at for at, (a, d) in enumerate(zip(anchors, depths, strict=True))}
    logits = [[caught["logits"][0, where[at, depth]].numpy() for depth in range(4)] for at in draws.ANCHORS]
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        held = {key: list(value.shape) for key, value in load_file(Path(folder) / "model.safetensors").items()}
    PEAGLE.mkdir(exist_ok=True)
    (PEAGLE / f"{name}.json").write_text(json.dumps({"config": written, "tensors": held}, indent=1) + "\n")
    save_file({"logits": np.array(logits, np.float32)}, PEAGLE / f"{name}.safetensors")


GEMMA_DIM = 32
"""Width of an attention head."""


def gemma_shapes(shared: bool) -> dict[str, list[int]]:
    """Return the shapes of a Gemma 4 DSpark head's tensors; `shared`: values are the keys."""
    size, dim, heads = draws.HIDDEN, GEMMA_DIM, LAYER["num_attention_heads"]
    kv_heads = 1 if shared else LAYER["num_key_value_heads"]
    sizes = {"input": size, "post_attention": size, "pre_feedforward": size, "post_feedforward": size}
    shapes: dict[str, list[int]] = {
        "fc.weight": [size, size * len(LAYERS)],
        "norm.weight": [size],
        "hidden_norm.weight": [size],
    }
    shapes |= {"embed_tokens.weight": [draws.VOCAB, size], "lm_head.weight": [draws.VOCAB, size]}
    shapes |= {f"markov_head.markov_{part}.weight": [draws.VOCAB, 16] for part in ("w1", "w2")}
    shapes |= {"confidence_head.proj.weight": [1, size + 16], "confidence_head.proj.bias": [1]}
    for layer in range(2):
        parts = {f"{part}_layernorm.weight": [width] for part, width in sizes.items()} | {"layer_scalar": [1]}
        parts |= {"self_attn.q_norm.weight": [dim], "self_attn.k_norm.weight": [dim]}
        parts |= {"self_attn.q_proj.weight": [heads * dim, size], "self_attn.o_proj.weight": [size, heads * dim]}
        parts |= {f"self_attn.{part}_proj.weight": [kv_heads * dim, size] for part in ("k" if shared else "kv")}
        parts |= {f"mlp.{part}_proj.weight": [80, size] for part in ("gate", "up")} | {
            "mlp.down_proj.weight": [size, 80]
        }
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    return shapes


def gemma_fields(shared: bool, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the head's config.json."""
    written = {key: LAYER[key] for key in LAYER if key != "rope_theta"}
    written |= {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "block_size": SLOTS}
    written |= {"hidden_activation": "gelu_pytorch_tanh", "global_head_dim": GEMMA_DIM, "num_global_key_value_heads": 1}
    written |= {
        "attention_k_eq_v": shared,
        "rope_parameters": {"full_attention": rope},
        "final_logit_softcapping": 20.0,
    }
    written |= {"mask_token_id": 255, "target_layer_ids": LAYERS, "markov_rank": 16, "markov_head_type": "vanilla"}
    written |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "enable_moe_block": False}
    return written


def gemma(name: str, shared: bool, rope: dict[str, Any]) -> None:
    """A DSpark head of two of Gemma 4's layers, without cache; `shared`: values are the keys."""
    config = Gemma4TextConfig(
        **{**LAYER, "rope_theta": None},
        hidden_activation="gelu_pytorch_tanh",
        global_head_dim=GEMMA_DIM,
        num_global_key_value_heads=1,
        attention_k_eq_v=shared,
        hidden_size_per_layer_input=0,
        layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": rope},
    )
    size, dim, heads = draws.HIDDEN, GEMMA_DIM, LAYER["num_attention_heads"]
    kv_heads = 1 if shared else LAYER["num_key_value_heads"]
    shapes = gemma_shapes(shared)
    w = {key: torch.tensor(draws.draw(key, shape)) for key, shape in shapes.items()}
    w |= {"embed_tokens.weight": EMBEDDING, "lm_head.weight": PROJECTION}
    turn = Gemma4TextRotaryEmbedding(config)

    def norm(x: torch.Tensor, key: str | None) -> torch.Tensor:
        made = Gemma4RMSNorm(x.shape[-1], eps=LAYER["rms_norm_eps"], with_scale=key is not None)
        if key is not None:
            made.weight.data = w[key]
        return made(x)

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(1, x.shape[1], count, dim)

    logits, confidences = [], []
    for at in draws.ANCHORS:
        tokens = torch.full((1, SLOTS), 255)
        tokens[0, 0] = TOKENS[0, at]
        x = EMBEDDING[tokens] * size**0.5
        c = norm(CONTEXT[:, :at] @ w["fc.weight"].T, "hidden_norm.weight")
        angles = turn(x, torch.arange(at + SLOTS)[None], "full_attention")
        for layer in range(2):
            of = f"layers.{layer}."
            a = norm(x, of + "input_layernorm.weight")
            both = torch.cat([c, a], dim=1)
            k = split(both @ w[of + "self_attn.k_proj.weight"].T, kv_heads)
            v = k if shared else split(both @ w[of + "self_attn.v_proj.weight"].T, kv_heads)
            q = norm(split(a @ w[of + "self_attn.q_proj.weight"].T, heads), of + "self_attn.q_norm.weight")
            q = rotate(q, *(part[:, -SLOTS:] for part in angles), unsqueeze_dim=2).transpose(1, 2)
            k = rotate(norm(k, of + "self_attn.k_norm.weight"), *angles, unsqueeze_dim=2)
            k, v = (y.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1) for y in (k, norm(v, None)))
            seen = (torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v).transpose(1, 2).reshape(1, SLOTS, -1)
            x = x + norm(seen @ w[of + "self_attn.o_proj.weight"].T, of + "post_attention_layernorm.weight")
            mlp = Gemma4TextMLP(config, layer)
            for part in ("gate", "up", "down"):
                getattr(mlp, f"{part}_proj").weight.data = w[f"{of}mlp.{part}_proj.weight"]
            out = mlp(norm(x, of + "pre_feedforward_layernorm.weight"))
            x = (x + norm(out, of + "post_feedforward_layernorm.weight")) * w[of + "layer_scalar"]
        h = norm(x, "norm.weight")
        before = w["markov_head.markov_w1.weight"][TOKENS[:, at : at + SLOTS]]
        bias = before @ w["markov_head.markov_w2.weight"].T
        logits.append(20 * torch.tanh(h @ PROJECTION.T / 20) + bias)
        read = torch.cat([h, before], dim=-1)
        confidences.append((read @ w["confidence_head.proj.weight"].T + w["confidence_head.proj.bias"])[..., 0])
    outputs = {"logits": torch.cat(logits).numpy(), "confidence": torch.cat(confidences).numpy()}
    keep(name, gemma_fields(shared, rope), shapes, **outputs)


if __name__ == "__main__":
    torch.manual_seed(0)
    zlab("dflash-full", FULL)
    zlab("dflash-sliding", SLIDING)
    zlab("dflash-sliding-sees-all", SLIDING, is_causal=False)
    zlab("dflash-full-causal", FULL, is_causal=True)
    zlab("dflash-output", FULL, nested=OUTPUT)
    zlab("dflash2", SLIDING, is_causal=False, nested=SELECTOR)
    by_speculators("dflash", FULL)
    by_speculators("dflash-sliding", SLIDING, draft_vocab=draws.DRAFT_VOCAB)
    by_speculators("dflash-sliding-sees-all", SLIDING, sliding_window_non_causal=True)
    for kind in ("vanilla", "gated", "rnn"):
        by_speculators(f"dspark-{kind}", FULL, markov_rank=16, markov_head_type=kind)
    by_speculators("dspark-anchor", FULL, markov_rank=16, markov_head_type="rnn", sample_from_anchor=False)
    by_speculators("dspark-vocabulary", SLIDING, draws.DRAFT_VOCAB, markov_rank=16)
    peagle("peagle")
    peagle("peagle-3.1", draws.DRAFT_VOCAB, fc_norm=True, norm_output=True, norm_before_residual=True)
    proportional = {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
    with torch.no_grad():
        gemma("deepspec-gemma4-shared", True, proportional)
        gemma("deepspec-gemma4", False, {"rope_type": "default", "rope_theta": 1000.0})
