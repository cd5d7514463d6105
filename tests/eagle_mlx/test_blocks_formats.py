"""Layouts of block drafters: round trips, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.errors import CheckpointError, ConfigError, HeadWarning
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import KINDS, load_head
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.block.fields import default_aux_layers, layer_types
from tests.eagle_mlx import test_blocks_golden as golden
from tests.eagle_mlx.heads import BLOCKS, dflash, dspark
from tests.fakes import tiny_target

TARGET = tiny_target(vocab=64)
SLIDING: dict[str, Any] = {"windows": (6, None), "causal": (True, False)}
HEADS = {
    **BLOCKS,
    "dflash, output": lambda t: dflash(t, embedding_scale=2.0, output_multiplier=0.5, logit_softcap=30.0),
    "dflash, sees all": lambda t: dflash(t, windows=(6, 6)),
    "dflash, anchored": lambda t: dflash(t, **SLIDING, window_start="anchor"),
    "dflash, around": lambda t: dflash(
        t, windows=(3, None), window_start="around", embedding_scale=1.0, logit_softcap=0.0
    ),
    "dspark, windows": lambda t: dspark(t, **SLIDING),
    "dspark, interleaved": lambda t: dspark(t, interleaved_rope=True, first_slot_drafts=False),
    "dspark, yarn": lambda t: dspark(
        t, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    ),
}
SAYABLE = {
    ("dflash", "dflash"): ["dflash", "dflash, windows", "dflash, output", "dflash, sees all"],
    ("dflash2", "dflash2"): ["dflash2"],
    ("dflash", "speculators"): ["dflash", "dflash, anchored"],
    ("dflash", "muse"): ["dflash, around"],
    ("dspark", "dspark"): ["dspark", "dspark, gated", "dspark, no markov", "dspark, yarn", "dspark, gemma"],
    ("dspark", "speculators"): ["dspark", "dspark, gated", "dspark, rnn", "dspark, yarn"],
    ("dspark", "specforge"): ["dspark", "dspark, gated", "dspark, windows", "dspark, interleaved", "dspark, no markov"],
}
LAYOUTS = {(kind, layout.name): layout for kind in ("dflash", "dflash2", "dspark") for layout in KINDS[kind].formats}


def made(name: str) -> BlockHead:
    head = HEADS[name](TARGET)
    head.attach(TARGET)
    return head


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout, names in SAYABLE.items() for name in names])
def test_round_trips_are_exact(layout: tuple[str, str], name: str, tmp_path: Path) -> None:
    head = made(name)
    LAYOUTS[layout].save(head, tmp_path / "h", target_name="tiny", dtype=mx.float16)
    again = load_head(tmp_path / "h", TARGET)
    assert type(again) is type(head)
    assert isinstance(again, BlockHead)
    assert again.config == head.config
    mine, theirs = weights_of(head), weights_of(again)
    assert mine.keys() == theirs.keys()
    assert all(mx.array_equal(mine[key].astype(mx.float16), value.astype(mx.float16)) for key, value in theirs.items())
    assert (again.token_ids is None) == (head.token_ids is None)
    if head.token_ids is not None and again.token_ids is not None:
        assert mx.array_equal(again.token_ids, head.token_ids)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (("dflash", "dflash"), "dflash, anchored"),
        (("dflash", "dflash"), "dflash, around"),
        (("dflash", "muse"), "dflash, windows"),
        (("dflash", "speculators"), "dflash, around"),
        (("dflash", "speculators"), "dflash, windows"),
        (("dflash", "speculators"), "dflash, output"),
        (("dspark", "dspark"), "dspark, windows"),
        (("dspark", "dspark"), "dspark, rnn"),
        (("dspark", "dspark"), "dspark, interleaved"),
        (("dspark", "speculators"), "dspark, no markov"),
        (("dspark", "specforge"), "dspark, rnn"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(layout: tuple[str, str], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layout cannot express"):
        LAYOUTS[layout].save(made(name), tmp_path / "h")
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("layout", [("dflash", "dflash"), ("dspark", "specforge")])
def test_a_mixture_of_layers_that_no_field_can_name_is_not_written(layout: tuple[str, str], tmp_path: Path) -> None:
    head = (dflash if layout[0] == "dflash" else dspark)(TARGET, windows=(6, None), causal=(False, True))
    with pytest.raises(ConfigError, match="a mixture of causal and other layers"):
        LAYOUTS[layout].save(head, tmp_path / "h", target_name="tiny", dtype=mx.float16)
    assert not (tmp_path / "h").exists()


FULL = "dflash-full"
SPARK = "speculators-dspark-vanilla"
REFUSED = [
    (FULL, {"attention_sink_bias": True}, "sets attention_sink_bias, which block drafters here do not support"),
    (FULL, {"something_new": 3}, "sets something_new"),
    (
        FULL,
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 4], "use_swa": True}},
        "sets use_swa",
    ),
    (FULL, {"dflash_config": 3}, "dflash_config must be an object"),
    (FULL, {"dflash_config": {"target_layer_ids": [1]}}, "lacks mask_token_id"),
    (FULL, {"mask_token_id": 999}, "mask_token_id 999 is not in a vocabulary of 256"),
    (FULL, {"target_layer_ids": [-1, 2, 4]}, "the embedding's output, which cannot be read"),
    (FULL, {"block_size": 1}, "drafts at least one token"),
    (FULL, {"hidden_act": "gelu"}, "only silu is known"),
    (FULL, {"architectures": ["DFlash2DraftModel"]}, "lacks conv_kernel_size"),
    (FULL, {"architectures": ["DFlash3DraftModel"]}, "of class .*DFlash3DraftModel.*; only DFlash, DFlash2 and DSpark"),
    ("dflash2", {"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 64"),
    (FULL, {"architectures": ["XPressDraftModel"]}, "of class .*XPressDraftModel"),
    (SPARK, {"correction_layers": 2}, "sets correction_layers"),
    (SPARK, {"markov_head_type": "lstm"}, "must be vanilla, gated or rnn"),
    (SPARK, {"model_type": "llama"}, "a layer of type llama; only qwen3"),
    (SPARK, {"draft_vocab_size": 96}, "needs its own lm_head"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        golden.load(tmp_path / "h", name, golden.fields(**changes))


DEEPSPEC = golden.in_other_packaging("Qwen3DSparkModel")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "trains layers with full attention"),
        ({"dflash_config": {"causal": True}}, "sets causal"),
        ({"attention_sink_bias": True}, "sets attention_sink_bias"),
    ],
)
def test_what_deepspec_does_not_train_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        golden.load(tmp_path / "h", SPARK, golden.in_other_packaging("Qwen3DSparkModel", **fields))


def test_fields_that_deepspec_copies_from_the_target_give_a_warning(tmp_path: Path) -> None:
    with pytest.warns(match="sets attn_output_gate, not known here"):
        golden.load(tmp_path / "h", SPARK, golden.in_other_packaging("Qwen3DSparkModel", attn_output_gate=True))


@pytest.mark.parametrize(("extra", "message"), [("g_proj.weight", "g_proj.weight"), ("fc.bias", "fc.bias")])
def test_unknown_tensors_are_named(extra: str, message: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors[extra] = mx.zeros((2, 2))

    with pytest.raises(CheckpointError, match=f"not known to this format: {message}"):
        golden.load(tmp_path / "h", FULL, change)


def test_masks_with_an_embedding_of_their_own_are_refused(tmp_path: Path) -> None:
    golden.load(tmp_path / "h", FULL)
    (tmp_path / "h" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt"):
        load_head(tmp_path / "h")


@pytest.mark.parametrize(("target_layers", "layers", "ids"), [(36, 5, (1, 9, 17, 25, 33)), (28, 1, (14,))])
def test_default_layers(target_layers: int, layers: int, ids: tuple[int, ...]) -> None:
    assert default_aux_layers(target_layers, layers) == ids


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_fields_of_the_small_heads_that_are_missing_follow_from_the_tensors(kind: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for name in ("markov_rank", "enable_confidence_head", "confidence_head_with_markov"):
            del config[name]

    name = f"speculators-dspark-{kind}"
    assert golden.difference(name, golden.in_a_batch(golden.load(tmp_path / "h", name, change))) < golden.CLOSE


def test_layers_that_are_not_named_follow_from_the_target(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        del config["dflash_config"]["target_layer_ids"], config["num_target_layers"]
        tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * config["hidden_size"]]

    with pytest.warns(HeadWarning, match=r"lacks target_layer_ids, so it reads z-lab's default layers, 1, 3; if"):
        assert golden.load(tmp_path / "h", FULL, change).config.aux_layers == (1, 3)
    with pytest.raises(CheckpointError, match="target_layer_ids is missing; load the head with its target"):
        load_head(tmp_path / "h")


QWEN3_4B = {
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 5,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
}
"""Further fields of z-lab's Qwen3-4B-DFlash-b16."""


def test_fields_of_published_heads_are_known(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    head = golden.load(tmp_path / "h", FULL, golden.fields(**QWEN3_4B))
    assert golden.difference(FULL, golden.in_a_batch(head)) < golden.CLOSE
    assert not recwarn.list


@pytest.mark.parametrize(("first", "windows"), [(None, ()), (1, (None, 4)), (0, (4, 4))])
def test_layers_slide_as_in_qwen3_if_their_types_are_not_named(
    first: int | None, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        del config["layer_types"]
        config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": first}

    assert golden.load(tmp_path / "h", FULL, change).config.windows == windows


def test_names_may_have_the_prefix_of_a_model(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    assert golden.difference(FULL, golden.in_a_batch(golden.load(tmp_path / "h", FULL, change))) < golden.CLOSE


def test_speculators_own_package_reads_it(tmp_path: Path) -> None:
    """Run where torch is installed; the logits are compared in test_blocks_golden.py, over the same weights."""
    speculators = pytest.importorskip("speculators.models.dspark")
    head = made("dspark, gated")
    LAYOUTS["dspark", "speculators"].save(head, tmp_path / "h", dtype=mx.float32)
    config = speculators.DSparkSpeculatorConfig.from_pretrained(tmp_path / "h")
    assert config.block_size == head.config.block_size
    assert json.loads((tmp_path / "h" / "config.json").read_text())["aux_hidden_state_layer_ids"] == [1, 3]
    assert np.allclose(config.transformer_layer_config.rms_norm_eps, head.config.rms_norm_eps)


@pytest.mark.parametrize(("uses", "first", "full"), [(True, 2, 2), (True, 28, 3), (False, 2, 3)])
def test_layers_without_types_slide_from_the_first_that_the_config_names(uses: bool, first: int, full: int) -> None:
    config = {"num_hidden_layers": 3, "use_sliding_window": uses, "max_window_layers": first}
    assert layer_types(config) == ["full_attention"] * full + ["sliding_attention"] * (3 - full)
