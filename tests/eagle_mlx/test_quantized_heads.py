"""Quantized heads: the text stays the target's, folders survive a round trip, and nothing else is quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import eagle_mlx as em
from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import kind_of, load_head
from eagle_mlx.heads.eagle import EagleHead
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.heads.eagle3.formats import save_speculators
from eagle_mlx.heads.precision import described, quantization_of, quantize, quantize_for
from eagle_mlx.target import Target
from tests.eagle_mlx.heads import ALL, KINDS, eagle, eagle3, mtp
from tests.eagle_mlx.test_formats_damage import JUNK
from tests.fakes import tiny_target, tiny_target_folder
from tests.full import diagonal, in_turn

TARGET = tiny_target(vocab=64)
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 7, 8, 50, 3, 2, 1, 60, 33], list(range(30))]
PARAMS = [
    em.SamplingParams(max_tokens=14),
    em.SamplingParams(max_tokens=11, temperature=0.9, seed=3),
    em.SamplingParams(max_tokens=17, temperature=1.3, seed=4, top_k=20),
    em.SamplingParams(max_tokens=9),
]
IN_4_BITS = {"group_size": 32, "bits": 4}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Return the texts of plain decoding."""
    return [em.Engine(TARGET).generate([p], q)[0].tokens for p, q in zip(PROMPTS, PARAMS, strict=True)]


def quantized_target(bits: int, **options: Any) -> Target:
    model = tiny_target(vocab=64).model
    nn.quantize(model, 32, bits, **options)
    return Target(model)


def save(head: Any, folder: Path, **options: Any) -> Path:
    kind_of(head).formats[0].save(head, folder, **options)
    return folder


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


# Decoding


@pytest.mark.parametrize(("kind", "bits"), in_turn(diagonal(ALL, [4, 8]), 2, of=5))
def test_the_text_is_that_of_plain_decoding(kind: str, bits: int, plain: list[list[int]]) -> None:
    head = ALL[kind](TARGET)
    quantize_for(head, TARGET, bits)
    assert quantization_of(head) == {"group_size": 32, "bits": bits}
    engine = em.Engine(TARGET, em.HeadProposer(head), policy=em.FixedPolicy(4), max_batch=3, prefill_chunk=8)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.tokens for output in outputs] == plain
    assert sum(output.drafted for output in outputs) > 50


@pytest.mark.parametrize("kind", in_turn(["eagle", "eagle3, one norm", "mtp, own ends", "dflash", "dspark, rnn"]))
def test_the_text_of_trees_is_that_of_plain_decoding(kind: str, plain: list[list[int]]) -> None:
    head = ALL[kind](TARGET)
    quantize_for(head, TARGET, 4)
    outputs = em.Engine(TARGET, em.HeadProposer(head), policy=em.FixedPolicy(3, nodes=7)).generate(
        PROMPTS[:3], PARAMS[:3]
    )
    assert [output.tokens for output in outputs] == plain[:3]


# What is quantized, and what is not


def test_norms_and_ids_stay_and_the_projections_do_not() -> None:
    head = eagle3(TARGET, draft_vocab=40, norm_before_fc=True)
    ids = head.token_ids
    quantize_for(head, TARGET, 4)
    packed = {name.removesuffix(".scales") for name in weights_of(head) if name.endswith(".scales")}
    attention = {f"midlayer.self_attn.{part}_proj" for part in "qkvo"}
    assert packed == {"fc", "lm_head", *attention, *(f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down"))}
    assert head.token_ids is ids
    assert described(head) == "4-bit weights in groups of 32"


def test_layers_that_do_not_fit_the_groups_stay() -> None:
    head = eagle3(TARGET, hidden_size=24, own_embedding=True)
    quantize_for(head, TARGET, 8)
    packed = {name.removesuffix(".scales") for name in weights_of(head) if name.endswith(".scales")}
    assert packed == {"fc", "midlayer.self_attn.o_proj", "midlayer.mlp.down_proj"}


def test_wide_heads_are_quantised_in_groups_of_64_as_mlx_lm_does() -> None:
    head = eagle(tiny_target(hidden=64))
    quantize_for(head, None, 4)
    assert quantization_of(head) == {"group_size": 64, "bits": 4}


def test_a_head_of_which_nothing_fits_is_said_to_be_one() -> None:
    target = tiny_target(hidden=40)
    shape = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8, "intermediate_size": 40}
    head = eagle(target, **shape)
    with pytest.raises(ConfigError, match="input width of no layer is a multiple of 32"):
        quantize_for(head, target, 4)
    quantize_for(head, quantized_target(4))
    assert quantization_of(head) is None


# Defaults and options


@pytest.mark.parametrize(("of_target", "requested", "bits"), [
    (4, None, 4), (8, None, 8), (6, None, None), (None, None, None),
    (4, 8, 8), (4, 16, None), (None, 4, 4), (8, 16, None),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::eagle_mlx.HeadWarning")
def test_a_head_gets_the_bits_of_its_target_unless_others_are_asked_for(
    of_target: int | None, requested: int | None, bits: int | None, tmp_path: Path
) -> None:
    target = TARGET if of_target is None else quantized_target(of_target)
    assert target.bits == of_target
    folder = save(eagle3(TARGET, draft_vocab=40), tmp_path / "head")
    quantization = quantization_of(em.load_head(folder, target, check=False, bits=requested))
    assert (quantization["bits"] if quantization else None) == bits


def test_of_a_target_in_several_sizes_most_weights_decide() -> None:
    mixed = quantized_target(4, class_predicate=lambda path, part: _mixed(path, part, 8))
    assert mixed.bits == 4
    few = quantized_target(4, class_predicate=lambda path, part: "layers.0" in path and _is(part))
    assert few.bits is None


def _is(part: nn.Module) -> bool:
    return hasattr(part, "to_quantized")


def _mixed(path: str, part: nn.Module, bits: int) -> bool | dict[str, int]:
    return _is(part) and ({"group_size": 32, "bits": bits} if "down_proj" in path else True)


@pytest.mark.parametrize("bits", [0, 2, 5, 32, "4bit"])
def test_other_bits_are_refused(bits: Any, tmp_path: Path) -> None:
    folder = save(eagle3(TARGET), tmp_path / "head")
    with pytest.raises(ConfigError, match=f"a head can have 4, 8 or 16 bits .*, not {bits!r}"):
        em.load_head(folder, TARGET, check=False, bits=bits)


# On disk


@pytest.mark.parametrize("kind", in_turn([*KINDS, "dflash", "dspark", "dspark, gated"], of=3))
def test_a_quantised_head_comes_back_as_it_went(kind: str, tmp_path: Path) -> None:
    head: Any = ALL[kind](TARGET)
    quantize(head, 4, 32)
    folder = save(head, tmp_path / "head", dtype=mx.float32)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == {**IN_4_BITS, "mode": "affine"}
    again: Any = em.load_head(folder, TARGET, check=False, bits=8)
    assert again.config == head.config
    before, after = weights_of(head), weights_of(again)
    assert before.keys() == after.keys()
    assert all(x.dtype == after[name].dtype and mx.array_equal(x, after[name]) for name, x in before.items())
    outputs = [
        em.Engine(TARGET, em.HeadProposer(drafter), policy=em.FixedPolicy(3)).generate(PROMPTS, PARAMS[0])
        for drafter in (head, again)
    ]
    assert [o.accepted_by_position for o in outputs[0]] == [o.accepted_by_position for o in outputs[1]]


@pytest.mark.parametrize(("make", "kind"), [(eagle, EagleHead), (eagle3, Eagle3Head)])
def test_packed_weights_do_not_hide_the_kind_of_a_head(make: Any, kind: type, tmp_path: Path) -> None:
    """The first layer's width distinguishes EAGLE-1 and EAGLE-3, and packing changes it."""
    head = make(TARGET)
    quantize(head, 4, 32)
    folder = save(head, tmp_path / "head")
    tensors = mx.load(str(folder / "model.safetensors"))
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    change(folder, norm_before_residual=False)
    assert isinstance(load_head(folder, TARGET), kind)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization": None}, "sets quantization_config to .* only those that MLX has quantized can be read"),
        ({"quantization": None, "quantization_config": None}, "not known to this format: .*scales"),
        ({"quantization": {**IN_4_BITS, "mode": "mxfp4"}, "quantization_config": None}, "mode 'mxfp4'; only affine is"),
        ({"quantization": {"bits": 4}, "quantization_config": None}, "quantization is .*; give group_size and"),
        ({"quantization": 4, "quantization_config": None}, "quantization is 4; it must be an object"),
        (
            {"quantization": {**IN_4_BITS, "fc": False}, "quantization_config": None},
            "quantization is .*fc.*; give",
        ),
        (
            {"quantization": {"group_size": 32, "bits": 7}, "quantization_config": None},
            "sets bits to 7; MLX knows 2, 3",
        ),
        ({"quantization": {"group_size": 32, "bits": 8}, "quantization_config": None}, "do not match its config.json"),
    ],
)
def test_quantisation_that_is_not_told_right_is_refused(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    head = eagle3(TARGET)
    quantize(head, 4, 32)
    folder = save(head, tmp_path / "head")
    change(folder, **fields)
    with pytest.raises(CheckpointError, match=reason):
        load_head(folder, TARGET)


def test_speculators_has_no_words_for_it(tmp_path: Path) -> None:
    head = eagle3(TARGET)
    quantize(head, 4, 32)
    head.attach(TARGET)
    with pytest.raises(ConfigError, match="cannot express quantization="):
        save_speculators(head, tmp_path / "head")


def test_the_targets_embedding_is_not_written_where_no_other_loader_reads_it(tmp_path: Path) -> None:
    head = eagle(TARGET)
    quantize(head, 8, 32)
    head.attach(TARGET)
    tensors = mx.load(str(save(head, tmp_path / "head") / "model.safetensors"))
    assert "embed_tokens.weight" not in tensors
    assert em.load_head(tmp_path / "head", TARGET, check=False)


def test_an_mtp_head_says_it_where_older_versions_look_too(tmp_path: Path) -> None:
    head = mtp(TARGET)
    quantize(head, 8, 32)
    folder = save(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_mlx_mtp"]["quantization"] == {"group_size": 32, "bits": 8}


def test_a_target_from_disk_knows_its_bits(tmp_path: Path) -> None:
    assert em.load_target(tiny_target_folder(tmp_path / "target")).bits is None


@pytest.mark.parametrize("make", [eagle, eagle3, mtp])
def test_no_quantization_is_so_wrong_that_it_is_not_an_error_of_ours(make: Any, tmp_path: Path) -> None:
    head = make(TARGET)
    quantize(head, 4, 32)
    folder = save(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    place = config["eagle_mlx_mtp"] if make is mtp else config
    for part in (None, "group_size", "bits", "mode"):
        for junk in (value for value in JUNK if part != "mode" or value is not None):
            wrong = junk if part is None else {**IN_4_BITS, part: junk}
            place["quantization"], config["quantization_config"] = wrong, None
            (folder / "config.json").write_text(json.dumps(config))
            with pytest.raises(CheckpointError):
                load_head(folder, TARGET)
