"""Random heads of every kind for tiny targets, and heads that are right by construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from eagle_mlx.cache.draft_window import DraftWindow
from eagle_mlx.formats.tensors import HeadFolder
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockConfig, BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.eagle import EagleConfig, EagleHead
from eagle_mlx.heads.eagle3 import Eagle3Head, PEagleConfig, PEagleHead
from eagle_mlx.heads.mtp import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.formats import load_split, save_split
from eagle_mlx.proposers.draft_model import DraftModelProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.proposers.memory import Memory
from eagle_mlx.proposers.ngram import HybridProposer, NgramProposer
from eagle_mlx.target import Target
from tests.architectures import COMMON, CONFIGS, tiny_model
from tests.fakes import randomize, tiny_config, tiny_head

SHAPE: dict[str, Any] = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def eagle(target: Target, seed: int = 0, **fields: Any) -> EagleHead:
    head = EagleHead(EagleConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, **{**SHAPE, **fields}))
    randomize(head, seed, 0.2)
    return head


def eagle3(target: Target, seed: int = 0, draft_vocab: int | None = None, **fields: Any) -> Eagle3Head:
    plain = tiny_head(target, seed, draft_vocab)
    config = replace(plain.config, **fields)
    head = Eagle3Head(config, plain.token_ids)
    randomize(head, seed, 0.2)
    return head


def mtp(target: Target, seed: int = 0, model_type: str = "qwen3", **fields: Any) -> MTPHead:
    head = MTPHead(MTPConfig(model_type, mtp_layer(target, model_type), **fields))
    randomize(head, seed, 0.2)
    return head


def recurrent_draft(target: Target) -> DraftModelProposer:
    model = tiny_model("qwen3_5", vocab_size=target.vocab_size)
    randomize(model, 0, 0.2)
    return DraftModelProposer(Target(model))


def from_mlx_vlm(head: MTPHead) -> MTPHead:
    """Return a head as it comes back from mlx-vlm's layout."""
    with TemporaryDirectory() as folder:
        save_split(head, f"{folder}/head", dtype=mx.float32)
        return load_split(HeadFolder.read(Path(folder) / "head"))


def mtp_layer(target: Target, model_type: str) -> dict[str, Any]:
    """Return a config of that architecture with the target's sizes."""
    layer = tiny_config() if model_type == "qwen3" else {**COMMON, **CONFIGS[model_type]}
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "model_type": model_type}
    return {**layer, **sizes}


def peagle(target: Target, seed: int = 0, **more: Any) -> PEagleHead:
    plain = tiny_head(target, seed, more.pop("draft_vocab", None))
    own = {field.name: getattr(plain.config, field.name) for field in fields(plain.config)}
    head = PEagleHead(PEagleConfig(**{**own, "mask_token_id": 3, "num_hidden_layers": 2, **more}), plain.token_ids)
    randomize(head, seed, 0.2)
    return head


def dflash(target: Target, seed: int = 0, **fields: Any) -> DFlashHead:
    head = DFlashHead(block_config(target, **fields))
    randomize(head, seed, 0.2)
    return head


def dflash2(target: Target, seed: int = 0, **fields: Any) -> DFlash2Head:
    own = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 32, "selector_top_k": 4}
    head = DFlash2Head(block_config(target, **{**own, **fields}))
    randomize(head, seed, 0.2)
    return head


def dspark(target: Target, seed: int = 0, **fields: Any) -> DSparkHead:
    plain = fields.get("markov_head", "vanilla") is None
    markov = {} if plain else {"markov_head": "vanilla", "markov_rank": 32, "confidence_head": True}
    config = block_config(target, **{**markov, "first_slot_drafts": True, "block_size": 4, **fields})
    token_ids = None
    if config.draft_vocab_size < target.vocab_size:
        kept = np.sort(np.random.default_rng(seed).choice(target.vocab_size, config.draft_vocab_size, replace=False))
        token_ids = mx.array(kept, mx.int32)
    head = DSparkHead(config, token_ids)
    randomize(head, seed, 0.2)
    return head


def block_config(target: Target, **fields: Any) -> BlockConfig:
    """Return the config of a block drafter with two layers and blocks of five slots."""
    size, reads = target.hidden_size, (0, min(2, target.num_layers - 1))
    plain = {"num_hidden_layers": 2, "block_size": 5, "mask_token_id": 3, "aux_layers": reads, **SHAPE}
    vocab = {"vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
    return BlockConfig(**{**plain, **vocab, "hidden_size": size, **fields})


GEMMA: dict[str, Any] = {
    **{"gemma": True, "key_is_value": True, "num_key_value_heads": 1, "logit_softcap": 20.0},
    "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    **{"own_embedding": True, "own_lm_head": True},
}
BLOCKS: dict[str, Callable[[Target], BlockHead]] = {
    "dflash": dflash,
    "dflash, windows": lambda t: dflash(t, windows=(6, None), causal=(True, False)),
    "dflash, causal": lambda t: dflash(t, causal=(True, True), windows=(4, 4), window_start="anchor"),
    "dflash2": dflash2,
    "dspark": dspark,
    "dspark, gated": lambda t: dspark(t, markov_head="gated", block_size=5, first_slot_drafts=False),
    "dspark, rnn": lambda t: dspark(t, markov_head="rnn", draft_vocab_size=40, own_lm_head=True),
    "dspark, gemma": lambda t: dspark(t, **GEMMA, embedding_scale=t.hidden_size**0.5),
    "dspark, no markov": lambda t: dspark(t, markov_head=None, own_embedding=True),
}
"""Heads that draft a whole block in one forward."""
KINDS: dict[str, Callable[[Target], DraftHead]] = {
    "eagle": eagle,
    "eagle, two layers": lambda t: eagle(t, num_hidden_layers=2, bias=False, qkv_bias=True, own_embedding=True),
    "eagle3.1": lambda t: eagle3(t, fc_norm=True, norm_output=True),
    "eagle3, one norm": lambda t: eagle3(t, norm_before_fc=True, norm_before_residual=True, draft_vocab=40),
    "eagle3, narrow": lambda t: eagle3(t, hidden_size=24, own_embedding=True),
    "eagle3, two layers": lambda t: eagle3(t, num_hidden_layers=2, qk_norm=True, windows=(None, 6)),
    "eagle3, last hidden state": lambda t: eagle3(
        t, use_aux_hidden_state=False, aux_layers=(), hidden_norm=False, norm_logits=False
    ),
    "eagle3 of deepspec": lambda t: eagle3(t, aux_layers=(0, 1, 2, 3, 1), qk_norm=True, own_embedding=True),
    "mtp": mtp,
    "mtp, recycled norm": lambda t: mtp(t, norm_output=True, hidden_first=True, target_norm=False),
    "mtp, own ends": lambda t: mtp(t, own_embedding=True, own_lm_head=True),
    "mtp of deepseek": lambda t: mtp(t, model_type="deepseek_v3"),
    "mtp of glm": lambda t: mtp(t, model_type="glm4_moe"),
    "mtp of mimo": lambda t: mtp(t, model_type="mimo"),
    "mtp of qwen3-next": lambda t: mtp(t, model_type="qwen3_next"),
    "mtp of mlx-vlm": lambda t: from_mlx_vlm(mtp(t, model_type="qwen3_5", norm_output=True)),
}
PARALLEL: dict[str, Callable[[Target], DraftHead]] = {
    "peagle": lambda t: peagle(t, own_embedding=True),
    "peagle, 3.1": lambda t: peagle(t, fc_norm=True, norm_output=True, draft_vocab=40),
}
IN_BLOCKS: dict[str, Callable[[Target], DraftHead]] = {
    **{name: BLOCKS[name] for name in ("dflash, windows", "dflash2", "dspark")},
    "peagle": PARALLEL["peagle"],
}
"""A head of each kind that drafts a whole block, for the suites of requests that come, go, fail and continue."""


def windowed(head: DraftHead) -> HeadProposer:
    """Return a proposer whose head sees the first token and the newest six."""
    proposer = HeadProposer(head)
    proposer.draft_window = DraftWindow(6, 1, slack=8)
    return proposer


WITH_HEADS: dict[str, Callable[[Target], HeadProposer | HybridProposer]] = {
    "head": lambda t: HeadProposer(tiny_head(t)),
    "head, window": lambda t: windowed(tiny_head(t)),
    "head, n-grams": lambda t: HybridProposer(HeadProposer(tiny_head(t)), NgramProposer()),
    "dflash, windows": lambda t: HeadProposer(IN_BLOCKS["dflash, windows"](t)),
    "dspark": lambda t: HeadProposer(IN_BLOCKS["dspark"](t)),
    "dflash2, n-grams": lambda t: HybridProposer(HeadProposer(IN_BLOCKS["dflash2"](t)), NgramProposer()),
    "peagle, n-grams": lambda t: HybridProposer(HeadProposer(IN_BLOCKS["peagle"](t)), NgramProposer(memory=Memory())),
}
PROPOSERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda t: None,
    "n-grams": lambda t: NgramProposer(),
    "n-grams, memory": lambda t: NgramProposer(memory=Memory(1 << 14)),
    "draft model": lambda t: DraftModelProposer(Target(t.model)),
    "recurrent draft model": recurrent_draft,
    **WITH_HEADS,
}
"""Ways to draft, for the same suites. The first draft model is the target itself."""
ALL: dict[str, Callable[[Target], DraftHead]] = {**KINDS, **BLOCKS, **PARALLEL}


def likeliest(head: BlockHead, logits: mx.array) -> mx.array | None:
    """Return the candidates of slots with logits [..., V], if the head selects among some."""
    count = head.config.selector_top_k
    return mx.argsort(-logits, axis=-1)[..., :count] if count else None


def silence(*modules: Any) -> None:
    """Make these layers add nothing."""
    for module in modules:
        module.weight = mx.zeros_like(module.weight)


def bigram_target(target: Target) -> Target:
    """Return the target with layers that add nothing and a projection that maps each token to another."""
    for layer in target.model.layers:
        silence(layer.self_attn.o_proj, layer.mlp.down_proj)
    rng = np.random.default_rng(0)
    order = mx.array(rng.permutation(target.vocab_size))
    unit = target.model.model.embed_tokens.weight
    unit = unit * mx.rsqrt(mx.mean(mx.square(unit), axis=-1, keepdims=True))
    target.model.model.norm.weight = mx.ones_like(target.model.model.norm.weight)
    target.model.args.tie_word_embeddings = False
    target.model.lm_head = nn.Linear(target.hidden_size, target.vocab_size, bias=False)
    target.model.lm_head.weight = unit[order]
    return Target(target.model)
