"""Block drafters in all layouts equal the packages that define them (tests/golden/make_blocks.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

from eagle_mlx.cache import RaggedCache
from eagle_mlx.heads import load_head
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.target import Target
from tests.eagle_mlx.heads import likeliest
from tests.fakes import tiny_config
from tests.golden import draws

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
CLOSE = 1e-4

Config = dict[str, Any]
Tensors = dict[str, mx.array]
Change = Callable[[Config, Tensors], None]


def target() -> Target:
    """A model with the references' embedding and projection."""
    config = tiny_config(layers=6, hidden=draws.HIDDEN, vocab=draws.VOCAB) | {"tie_word_embeddings": False}
    model = qwen3.Model(qwen3.ModelArgs(**config))  # type: ignore[arg-type]
    model.model.embed_tokens.weight = mx.array(draws.target("embed_tokens"))
    model.lm_head.weight = mx.array(draws.target("lm_head"))
    return Target(model)


TARGET = target()


def load(folder: Path, name: str, change: Change | None = None) -> BlockHead:
    """Write a golden head as a checkpoint, possibly changed, and load it."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    config, tensors = golden["config"], {}
    for key, shape in golden["tensors"].items():
        part = key.removesuffix(".weight")
        ends = part in ("embed_tokens", "lm_head") and shape[0] == draws.VOCAB
        tensors[key] = mx.array(draws.target(part) if ends else draws.draw(key, shape))
    if change is not None:
        change(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    head = load_head(folder, TARGET)
    assert isinstance(head, BlockHead)
    return head


def context(head: BlockHead, start: int, stop: int) -> mx.array:
    layers = [mx.array(draws.block_context(k)[None, start:stop]) for k in head.config.aux_layers]
    return head.features(layers)


def block(head: BlockHead, at: int) -> list[int]:
    return [int(draws.BLOCK_TOKENS[at])] + [head.config.mask_token_id] * (head.config.block_size - 1)


def outputs(head: BlockHead, h: mx.array, anchors: tuple[int, ...]) -> dict[str, mx.array]:
    """Return the logits and confidences of states [B, slots, H], where the text's own tokens come before each slot."""
    logits, config = head.logits(h), head.config
    if config.selector_rank:
        return {"logits": logits, "path": path(head, h, logits, anchors)}
    if config.markov_head is None:
        return {"logits": logits}
    texts = np.array([draws.BLOCK_TOKENS[at : at + config.block_size] for at in anchors], np.int32)
    before = mx.array(texts if config.first_slot_drafts else np.concatenate([texts[:, :1], texts[:, :-1]], axis=1))
    biases, state = [], None
    for slot in range(config.block_size):
        bias, state = head.markov_head.step(before[:, slot], h[:, slot], state)
        biases.append(bias)
    return {
        "logits": logits + mx.stack(biases, axis=1),
        "confidence": head.confidence_head(h, head.markov_head.embedding(before)),
    }


def path(head: BlockHead, h: mx.array, logits: mx.array, anchors: tuple[int, ...]) -> mx.array:
    """Return the tokens [B, slots - 1] that a sequential head drafts greedily."""
    tokens = [mx.array([int(draws.BLOCK_TOKENS[at]) for at in anchors])]
    for slot in range(1, head.config.block_size):
        final, _ = head.slot_logits(tokens[-1], h[:, slot], logits[:, slot], None, likeliest(head, logits[:, slot]))
        tokens.append(mx.argmax(final, axis=-1))
    return mx.stack(tokens[1:], axis=1)


def in_rounds(head: BlockHead) -> dict[str, mx.array]:
    """Run the five blocks one after another over one cache."""
    cache, before, rounds = RaggedCache(head.cache_layers, 1), 0, []
    for at in draws.ANCHORS:
        head.extend(context(head, before, at), cache)
        cache.lengths.advance(at - before)
        before = at
        h = head(head.embed(mx.array([block(head, at)])), mx.zeros((1, 0, head.hidden_size)), cache)
        rounds.append(outputs(head, h, (at,)))
    return {key: mx.concatenate([arrays[key] for arrays in rounds]) for key in rounds[0]}


def in_a_batch(head: BlockHead) -> dict[str, mx.array]:
    """Run the five blocks together: five rows with contexts of different lengths."""
    cache, longest = RaggedCache(head.cache_layers, 5), max(draws.ANCHORS)
    head.extend(mx.repeat(context(head, 0, longest), 5, axis=0), cache)
    cache.lengths.advance(mx.array(draws.ANCHORS, mx.int32), longest)
    h = head(head.embed(mx.array([block(head, at) for at in draws.ANCHORS])), mx.zeros((5, 0, head.hidden_size)), cache)
    return outputs(head, h, draws.ANCHORS)


def difference(name: str, computed: dict[str, mx.array], first: int = 0) -> float:
    """Return the largest deviation from the golden outputs, from slot `first` on."""
    wanted = mx.load(str(GOLDEN / f"{name}.safetensors"))
    assert isinstance(wanted, dict)
    assert wanted.keys() == computed.keys()
    return max(float(mx.abs(computed[key] - value)[:, first:].max().item()) for key, value in wanted.items())


@pytest.mark.parametrize("run", [in_rounds, in_a_batch])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_references(name: str, run: Callable[..., dict[str, mx.array]], tmp_path: Path) -> None:
    assert difference(name, run(load(tmp_path / "h", name))) < CLOSE


def in_other_packaging(architecture: str, **fields: Any) -> Change:
    """Return a change of speculators' layout to one whose fields are flat, or in `dflash_config`."""

    def change(config: Config, tensors: Tensors) -> None:
        layer, ids = config["transformer_layer_config"], [k - 1 for k in config["aux_hidden_state_layer_ids"]]
        own = {key: config[key] for key in ("block_size", "mask_token_id", "markov_rank", "markov_head_type")}
        own |= {key: config[key] for key in ("enable_confidence_head", "confidence_head_with_markov")}
        own |= {"target_layer_ids": ids, "sample_from_anchor": config["sample_from_anchor"]}
        flat = architecture == "Qwen3DSparkModel"
        config.clear()
        config |= {**layer, "architectures": [architecture], **(own if flat else {"dflash_config": own}), **fields}
        if flat:
            tensors |= {f"{part}.weight": mx.array(draws.target(part)) for part in ("embed_tokens", "lm_head")}

    return change


def interleave(config: Config, tensors: Tensors) -> None:
    """Order the dimensions of queries and keys so that neighbors are turned."""
    in_other_packaging("Lfm2DSparkDraftModel", rope_is_neox_style=False)(config, tensors)
    dim = config["head_dim"]
    order = mx.array([half * dim // 2 + at for at in range(dim // 2) for half in (0, 1)])
    for name, value in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = value[order]
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = value.reshape(-1, dim, value.shape[-1])[:, order].reshape(value.shape)


PACKAGINGS = {
    "DeepSpec": in_other_packaging("Qwen3DSparkModel", partial_rotary_factor=0.25),
    "SpecForge": in_other_packaging("DSparkDraftModel"),
    "LiquidAI": interleave,
}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "anchor"])
@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_other_packagings_of_the_same_head_are_the_same(packaging: str, kind: str, tmp_path: Path) -> None:
    """DeepSpec's, SpecForge's and LiquidAI's contracts, restated: no package of the registry runs them."""
    name = f"speculators-dspark-{kind}"
    assert difference(name, in_a_batch(load(tmp_path / "h", name, PACKAGINGS[packaging]))) < CLOSE


def fields(**changes: Any) -> Change:
    """Return a change of config fields, in the layer's config if they are there."""

    def change(config: Config, tensors: Tensors) -> None:
        for name, value in changes.items():
            places = [config, config.get("transformer_layer_config", {}), config.get("dflash_config", {})]
            place = next((place for place in places if name in place), config)
            place[name] = value

    return change


BROKEN = {
    "dflash-full": {"causality": fields(is_causal=True), "the layers": fields(target_layer_ids=[2, 1, 4])},
    "dflash-sliding": {"causality": fields(is_causal=False), "the window": fields(sliding_window=5)},
    "dflash-sliding-sees-all": {"the default": fields(is_causal=None), "mask": fields(mask_token_id=3)},
    "dflash-output": {"scale": fields(input_embedding_scale=1.0), "softcap": fields(final_logit_softcapping=4.0)},
    "speculators-dflash": {"the layers": fields(aux_hidden_state_layer_ids=[1, 2, 4])},
    "speculators-dflash-sliding": {
        "the window": fields(sliding_window=5),
        "causality": fields(sliding_window_non_causal=True),
    },
}
CASES = [(name, what) for name, broken in BROKEN.items() for what in broken]


@pytest.mark.parametrize(("name", "what"), CASES, ids=lambda part: part)
def test_a_field_read_wrongly_is_noticed(name: str, what: str, tmp_path: Path) -> None:
    assert difference(name, in_a_batch(load(tmp_path / "h", name, BROKEN[name][what]))) > 100 * CLOSE


def test_the_two_kinds_of_windows_differ(tmp_path: Path) -> None:
    """z-lab's end at each slot, speculators' before the anchor."""
    first, second = (
        load(tmp_path / name, name) for name in ("dflash-sliding-sees-all", "speculators-dflash-sliding-sees-all")
    )
    assert (first.config.window_start, second.config.window_start) == ("slot", "anchor")
    assert difference("dflash-sliding-sees-all", in_a_batch(second), first=1) > 100 * CLOSE


@pytest.mark.parametrize("tokens", [3, 4])
def test_old_files_tell_by_their_number_of_tokens_which_slot_drafts_first(tokens: int, tmp_path: Path) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        del config["sample_from_anchor"]
        config["block_size"] = 4
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens

    head = load(tmp_path / "h", "speculators-dspark-vanilla", change)
    assert head.config.drafts == tokens
