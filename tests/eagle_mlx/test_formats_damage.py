"""Bad input: every damaged file of a head raises our own error with its name, and no head is loaded silently."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import ModelCard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_mlx import heads
from eagle_mlx.catalog.base_model import base_model_of
from eagle_mlx.errors import CheckpointError, EagleError, TargetError
from eagle_mlx.formats.mtp_layers import has_mtp_layer
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle import save_eagle
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.eagle3.formats import save_speculators
from eagle_mlx.heads.mtp import mtp_of_model, save_mtp
from eagle_mlx.hub import weights_digest
from eagle_mlx.serve.api.loader import check_files
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target import load_target
from eagle_mlx.train.publish.bundle import read_source, write_bundle
from tests.eagle_mlx import test_heads_golden as golden
from tests.eagle_mlx.heads import BLOCKS, KINDS, PARALLEL, eagle, eagle3, mtp
from tests.fakes import tiny_target, tiny_target_folder
from tests.full import in_full, some

TARGET = tiny_target(vocab=64)
WRITERS: dict[str, tuple[Any, Any]] = {
    "eagle": (save_eagle, eagle),
    "eagle3": (save_eagle3, KINDS["eagle3, one norm"]),
    "speculators": (save_speculators, KINDS["eagle3, one norm"]),
    "mtp": (save_mtp, mtp),
    "mtp of mlx-vlm": (heads.KINDS["mtp"].formats[2].save, KINDS["mtp of mlx-vlm"]),
    "peagle": (save_speculators, PARALLEL["peagle"]),
    "peagle, portable": (save_eagle3, PARALLEL["peagle"]),
    "dflash": (heads.KINDS["dflash"].formats[0].save, BLOCKS["dflash, windows"]),
    "dflash of speculators": (heads.KINDS["dflash"].formats[1].save, BLOCKS["dflash"]),
    "dflash2": (heads.KINDS["dflash2"].formats[0].save, BLOCKS["dflash2"]),
    "dspark": (heads.KINDS["dspark"].formats[0].save, BLOCKS["dspark, gemma"]),
    "dspark of speculators": (heads.KINDS["dspark"].formats[1].save, BLOCKS["dspark, rnn"]),
    "dspark of specforge": (heads.KINDS["dspark"].formats[2].save, BLOCKS["dspark"]),
}
JUNK = [None, "x", "", -1, 0, 7, 10**9, 10**18, 1.5, math.inf, math.nan, [], [1], ["a"], {}, {"a": 1}, True, "false"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (save, make) in WRITERS.items():
        head = make(TARGET)
        head.attach(TARGET)
        made[name] = tmp_path_factory.mktemp("heads") / name
        save(head, made[name])
    return made


def fields(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return every field, with those of nested objects."""
    paths = []
    for name, value in config.items():
        paths += [(*path, name), *(fields(value, (*path, name)) if isinstance(value, dict) else [])]
    return paths


@pytest.mark.parametrize("layout", WRITERS)
def test_no_field_can_be_so_wrong_that_it_is_not_an_error_of_ours(layout: str, folders: dict[str, Path]) -> None:
    folder, refused, stride = folders[layout], 0, in_full(3, 12)
    file = folder / "config.json"
    text = file.read_text()
    try:
        for index, path in enumerate(fields(json.loads(text))):
            for junk in JUNK[index % stride :: stride]:
                config = json.loads(text)
                inner = config
                for name in path[:-1]:
                    inner = inner[name]
                inner[path[-1]] = junk
                file.write_text(json.dumps(config))
                try:
                    load_head(folder, TARGET)
                except EagleError:
                    refused += 1
    finally:
        file.write_text(text)
    assert refused > in_full(30, 7)


@settings(max_examples=some(90), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), bit=st.integers(0, 7), layout=st.sampled_from(sorted(WRITERS)))
def test_a_flipped_bit_in_the_header_is_refused_or_changes_nothing(
    at: float, bit: int, layout: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    raw = (folders[layout] / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    damaged = bytearray(raw)
    damaged[int(at * (size - 1))] ^= 1 << bit
    folder = tmp_path / layout
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((folders[layout] / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        load_head(folder, TARGET)
    except EagleError:
        return
    wanted, got = read_tensors(folders[layout]), read_tensors(folder)
    assert wanted.keys() == got.keys()
    assert all(got[name].dtype == x.dtype and mx.array_equal(got[name], x) for name, x in wanted.items())


def saved(folder: Path, draft_vocab: int | None = 40) -> Path:
    save_eagle3(eagle3(TARGET, draft_vocab=draft_vocab), folder)
    return folder


def rewrite(folder: Path, **changes: mx.array) -> None:
    tensors = read_tensors(folder) | changes
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def reconfigure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight"])
def test_weights_that_are_no_numbers_are_named(bad: float, name: str, tmp_path: Path) -> None:
    saved(tmp_path / "h")
    weight = read_tensors(tmp_path / "h")[name]
    rewrite(tmp_path / "h", **{name: mx.where(mx.arange(weight.size).reshape(weight.shape) == 3, bad, weight)})
    with pytest.raises(CheckpointError, match=rf"have NaN or infinity: {name};"):
        load_head(tmp_path / "h")


def retype(file: Path, name: str, dtype: str) -> None:
    """Change a tensor's type in a safetensors file to another type of the same size."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header[name]["dtype"] = dtype
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content + raw[8 + size :])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8"])
@pytest.mark.parametrize("layout", WRITERS)
def test_weights_in_8_bits_without_scales_are_named(
    layout: str, dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """MLX reads 8-bit floats as integers: -0.1 would become 156."""
    folder = tmp_path / "h"
    shutil.copytree(folders[layout], folder)
    name = next(n for n in read_tensors(folder) if n.endswith("mlp.up_proj.weight"))
    rewrite(folder, **{name: mx.to_fp8(read_tensors(folder)[name])})
    retype(folder / "model.safetensors", name, dtype)
    wanted = rf"{name} in .* is of type .*int8, .* scale .* bfloat16"
    with pytest.raises(CheckpointError, match=wanted):
        load_head(folder)


def test_a_published_mtp_layer_in_8_bits_without_scales_is_named(tmp_path: Path) -> None:
    folder = golden.written(tmp_path / "m", "mtp-mimo")
    name = "model.mtp_layers.0.mlp.up_proj.weight"
    rewrite(folder, **{name: mx.to_fp8(read_tensors(folder)[name])})
    with pytest.raises(CheckpointError, match=rf"{name} in .* is of type .*uint8,"):
        mtp_of_model(folder)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_shard_that_the_index_names_is_said_to_be_missing(lost: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    whole = folder / "model.safetensors"
    tensors = read_tensors(folder)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "of-an-older-head.safetensors")}))
    assert load_head(folder), "one file that holds everything needs no index"
    for shard in set(where.values()):
        mx.save_safetensors(str(folder / shard), {name: x for name, x in tensors.items() if where[name] == shard})
    whole.unlink()
    index.write_text(json.dumps({"weight_map": where}))
    assert load_head(folder)
    name = f"model-0000{lost}-of-00002.safetensors"
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {name}, which its model.safetensors.index.json names; download"):
        load_head(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", mx.zeros(40, mx.float32), "d2t in .* has numbers of type .*float32, expected integers"),
        ("d2t", mx.array([*range(40)][::-1]), "d2t in .* does not give ascending ids"),
        ("d2t", mx.array([0, 1, *[0] * 38]), "d2t in .* does not give ascending ids"),
        ("d2t", mx.full(40, -1), "d2t in .* does not give ascending ids"),
        ("d2t", mx.full(40, 25), "d2t in .* ascending ids of a vocabulary of 64"),
        ("d2t", mx.full(40, 2**63 - 1), "d2t in .* ascending ids of a vocabulary of 64"),
        ("d2t", mx.array(0), r"d2t in .* has shape \(\), expected \(40,\)"),
        ("t2d", mx.ones(65, mx.bool_), r"t2d in .* has shape \(65,\), expected \(64,\)"),
        ("t2d", mx.ones(64, mx.bool_), "t2d and d2t in .* name different draft vocabularies"),
    ],
)
def test_draft_vocabularies_that_cannot_be(name: str, value: mx.array, message: str, tmp_path: Path) -> None:
    rewrite(saved(tmp_path / "h"), **{name: value})
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "h")


def test_a_whole_vocabulary_with_maps_and_without(tmp_path: Path) -> None:
    """SpecForge writes empty maps if the head drafts every token. Any other map is an error."""
    saved(tmp_path / "h", None)
    assert load_head(tmp_path / "h").token_ids is None
    rewrite(tmp_path / "h", d2t=mx.zeros(64, mx.int64), t2d=mx.ones(64, mx.bool_))
    assert load_head(tmp_path / "h").token_ids is None
    rewrite(tmp_path / "h", t2d=mx.arange(64) > 3)
    with pytest.raises(CheckpointError, match="t2d and d2t"):
        load_head(tmp_path / "h")
    saved(tmp_path / "g", None)
    rewrite(tmp_path / "g", t2d=mx.arange(64) > 3)
    with pytest.raises(CheckpointError, match="t2d and d2t"):
        load_head(tmp_path / "g")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": "false"}, "norm_before_residual to 'false'; it must be true or false"),
        ({"eagle_config": [1]}, r"eagle_config must be an object, not \[1\]"),
        ({"eagle_mlx": "x"}, "eagle_mlx must be an object"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1.5, 2]}, "not usable"),
        ({"hidden_size": 48}, r"fc.weight has shape \(32, 96\), expected \(48, 96\)"),
    ],
)
def test_configs_that_contradict_themselves_or_the_weights(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reconfigure(saved(tmp_path / "h"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "h")


def test_an_empty_list_of_layers_names_none(tmp_path: Path) -> None:
    """Model-Optimizer writes this for the default layers."""
    ids = "eagle_aux_hidden_state_layer_ids"
    reconfigure(saved(tmp_path / "h"), eagle_config={ids: [], "use_aux_hidden_state": True}, **{ids: None})
    assert load_head(tmp_path / "h", TARGET).aux_layers == (0, 2, 3)
    with pytest.raises(CheckpointError, match="does not name the layers"):
        load_head(tmp_path / "h")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path) -> None:
    """In weights of a head, in both kinds of files, and of a target."""
    reason = r"is a Git LFS pointer and not the weights; type git lfs pull in"
    head = saved(tmp_path / "head")
    weights = head / "model.safetensors"
    weights.write_text(POINTER)
    with pytest.raises(CheckpointError, match=reason):
        load_head(head, TARGET)
    weights.rename(head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=reason):
        load_head(head, TARGET)
    target = tiny_target_folder(tmp_path / "target")
    for file in target.glob("*.safetensors"):
        file.write_text(POINTER)
    with pytest.raises(TargetError, match=reason):
        load_target(target)


def test_files_that_macos_adds_beside_weights_are_ignored(tmp_path: Path) -> None:
    """On disks without extended attributes, such as exFAT, it keeps them in files named `._model.safetensors`."""
    head, target = saved(tmp_path / "head"), tiny_target_folder(tmp_path / "target")
    digest = weights_digest(head)
    for folder in (head, target):
        (folder / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(80))
    load_head(head, TARGET)
    assert weights_digest(head) == digest
    assert base_model_of(str(target)) is None
    check_files(LoadConfig(target, Speculation(mode="eagle", head=str(head))))
    write_bundle(tmp_path / "bundle", read_source(head), ModelCard("A head."), "owner/base")
    assert not list(tmp_path.glob("bundle/._*"))


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"model_type": "qwen3_next"}', '{"model_type": 3}'])
def test_a_folder_that_cannot_be_read_has_no_mtp_layer(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    assert not has_mtp_layer(tmp_path)
