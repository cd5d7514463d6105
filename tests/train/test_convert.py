"""eagle-convert: exact between layouts, MTP heads from published models, and no files left after an error."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import base_model_of
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads import kind_of, load_head
from eagle_mlx.heads.eagle import save_eagle
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.mtp import save_mtp
from eagle_mlx.heads.precision import quantize
from eagle_mlx.target import Target, load_target
from eagle_mlx.train.convert.cli import main
from tests import hub_server
from tests.eagle_mlx.heads import dflash, dflash2, dspark, eagle, eagle3, mtp, peagle
from tests.eagle_mlx.test_formats_torch import Storage, tensor, torch_file
from tests.fakes import tiny_target, tiny_target_folder
from tests.full import some

TARGET = tiny_target(vocab=64)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def same_files(a: Path, b: Path) -> bool:
    """Return whether the configs are equal and the tensors equal bit for bit."""
    mine, theirs = read_tensors(a), read_tensors(b)
    return (
        json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())
        and mine.keys() == theirs.keys()
        and all(x.dtype == theirs[name].dtype and bool(mx.array_equal(x, theirs[name])) for name, x in mine.items())
    )


def convert(source: Path, to: str, output: Path, *more: str) -> None:
    assert main([str(source), "--to", to, "--output", str(output), *more]) == 0


ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@st.composite
def flags(draw: st.DrawFn) -> dict[str, Any]:
    """Draw options of a head that speculators' format can express."""
    norm = draw(st.sampled_from(["norm_before_fc", "fc_norm", None]))
    which = draw(st.sampled_from(["qk_norm", "mlp_bias", None]))
    layers = draw(st.sampled_from([1, 2]))
    return {
        **({norm: True} if norm else {}),
        **({which: True} if which else {}),
        "norm_before_residual": draw(st.booleans()),
        "norm_output": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rope_scaling": draw(st.sampled_from(ROPES)),
        "rope_theta": draw(st.sampled_from([1e4, 5e5])),
        "aux_layers": tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))),
        "num_hidden_layers": layers,
        "windows": draw(st.sampled_from([(), (6,) * layers])),
        "own_embedding": True,
        "draft_vocab": draw(st.sampled_from([None, 40])),
    }


@settings(max_examples=some(60))
@given(fields=flags(), dtype=st.sampled_from(sorted(DTYPES)))
def test_to_speculators_and_back_every_bit_is_the_same(
    fields: dict[str, Any], dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flags")
    head = eagle3(TARGET, **fields)
    save_eagle3(head, folder / "a", target_name="org/model", extra={"step": 3}, dtype=DTYPES[dtype])
    convert(folder / "a", "speculators", folder / "b")
    convert(folder / "b", "eagle3", folder / "c")
    convert(folder / "c", "speculators", folder / "d")
    assert same_files(folder / "a", folder / "c")
    assert same_files(folder / "b", folder / "d")
    assert load_head(folder / "b").config == head.config


def test_the_output_of_a_run_means_its_best_head(tmp_path: Path) -> None:
    save_eagle3(eagle3(TARGET), tmp_path / "run" / "best", target_name="org/model")
    for source, output in (("run", "a"), ("run/best", "b")):
        convert(tmp_path / source, "eagle3", tmp_path / output)
    assert same_files(tmp_path / "a", tmp_path / "b")


CASES = [("qwen3", dtype) for dtype in DTYPES] + [
    (model, dtype) for model in ("qwen3_next", "qwen3_5") for dtype in ("bfloat16", "float16")
]


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_mtp_to_speculators_and_back_every_bit_is_the_same(model: str, dtype: str, tmp_path: Path) -> None:
    head = mtp(TARGET, model_type=model, norm_output=True, target_norm=dtype == "float16")
    kind = {"qwen3_5": "qwen3_5_text"}.get(model, model)
    head.config = type(head.config)(**{**vars(head.config), "layer": {**head.config.layer, "model_type": kind}})
    head.norm.weight = head.norm.weight * 5  # with this mean, norms of this layout would be taken for plain ones
    head.enorm.weight = head.enorm.weight * mx.array([1e-3, 1.0] * 16)
    save_mtp(head, tmp_path / "a", target_name="org/model", extra={"step": 3}, dtype=DTYPES[dtype])
    convert(tmp_path / "a", "speculators", tmp_path / "b")
    convert(tmp_path / "b", "mtp", tmp_path / "c")
    assert same_files(tmp_path / "a", tmp_path / "c")
    names = set(read_tensors(tmp_path / "b"))
    assert {"mtp_layers.0.input_proj.weight", "mtp_layers.0.final_layernorm.weight"} <= names
    assert all(name.startswith("mtp_layers.0.") for name in names)


@pytest.mark.parametrize(
    ("make", "layout", "other"),
    [
        (dspark, "dspark", "speculators"),
        (dspark, "dspark", "specforge"),
        (dflash, "dflash", "speculators"),
        (peagle, "peagle", "speculators"),
        (dflash2, "dflash2", "dflash2"),
    ],
)
def test_block_heads_to_another_layout_and_back_every_bit_is_the_same(
    make: Any, layout: str, other: str, tmp_path: Path
) -> None:
    head = make(TARGET, own_embedding=True) if make is peagle else make(TARGET)
    (first,) = (form for form in kind_of(head).formats if form.name == layout)
    first.save(head, tmp_path / "a", target_name="org/model", extra={"step": 3}, dtype=mx.bfloat16)
    convert(tmp_path / "a", other, tmp_path / "b")
    convert(tmp_path / "b", layout, tmp_path / "c")
    assert same_files(tmp_path / "a", tmp_path / "c")


def test_zero_centered_norms_in_float32_lose_at_most_the_last_digit(tmp_path: Path) -> None:
    head = mtp(TARGET, model_type="qwen3_next", norm_output=True)
    save_mtp(head, tmp_path / "a", dtype=mx.float32)
    convert(tmp_path / "a", "speculators", tmp_path / "b")
    convert(tmp_path / "b", "mtp", tmp_path / "c")
    tensors, other = read_tensors(tmp_path / "a"), read_tensors(tmp_path / "c")
    assert tensors.keys() == other.keys()
    for name, value in tensors.items():
        error = float(mx.abs(value - other[name]).max().item())
        assert error <= (1.2e-7 if "norm" in name else 0), name


def test_a_head_without_an_embedding_gets_its_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    target = load_target(folder)
    save_eagle3(eagle3(target, draft_vocab=40), tmp_path / "a")
    convert(tmp_path / "a", "speculators", tmp_path / "b", "--target", str(folder), "--depth", "5")
    printed = capsys.readouterr()
    assert "with a copy of the target's embedding" in printed.out
    assert "EAGLE-MLX has read it back; the layout is that of speculators and vLLM" in printed.out
    assert "warning: in " in printed.err, "its weights are random, and the target is at hand to see it"
    assert f"verifier: {folder}, which only this machine has; to share the head give --base-model" in printed.err
    held = read_tensors(tmp_path / "b")
    assert mx.allclose(held["embed_tokens.weight"], target.embed(mx.arange(4096)), atol=1e-2)
    proposal = json.loads((tmp_path / "b" / "config.json").read_text())["speculators_config"]
    assert proposal["proposal_methods"][0]["speculative_tokens"] == 5
    assert proposal["verifier"]["name_or_path"] == str(folder), "its name would be sought on the hub"
    convert(tmp_path / "b", "eagle3", tmp_path / "c")
    tensors = [read_tensors(tmp_path / name) for name in "ac"]
    assert all(mx.array_equal(x, tensors[1][name]) for name, x in tensors[0].items())


ORIGINAL, FOUR_BITS = "owner/tiny", {"quantization": {"group_size": 32, "bits": 4}}
CARD = {"library_name": "mlx", "tags": ["mlx"]}


@pytest.mark.parametrize(
    ("config", "card", "base"),
    [
        (FOUR_BITS, CARD | {"base_model": ORIGINAL}, ORIGINAL),
        (FOUR_BITS, CARD | {"base_model": [ORIGINAL], "base_model_relation": "quantized"}, ORIGINAL),
        (FOUR_BITS, CARD | {"base_model": [ORIGINAL, "owner/other"]}, None),
        (FOUR_BITS, CARD | {"base_model": ORIGINAL, "base_model_relation": "finetune"}, None),
        (FOUR_BITS, CARD | {"base_model": "mlx-community/tiny-bf16"}, None),
        (FOUR_BITS, CARD | {"base_model": "/home/me/tiny"}, None),
        (FOUR_BITS, CARD, None),
        (FOUR_BITS, None, None),
        ({}, CARD | {"base_model": ORIGINAL}, None),
    ],
)
def test_the_base_model_of_a_conversion_is_found(
    config: dict[str, Any], card: dict[str, Any] | None, base: str | None, tmp_path: Path
) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    if card is not None:
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n\nA model.\n")
    assert base_model_of(str(folder)) == base


@pytest.mark.parametrize("card", ["---\nbase_model: [\n---\n", "---\n- base_model\n---\n", "no front matter"])
def test_a_card_without_a_base_model(card: str, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    (folder / "config.json").write_text(json.dumps(FOUR_BITS))
    (folder / "README.md").write_text(card)
    assert base_model_of(str(folder)) is None


def quantized(folder: Path, original: Path) -> Path:
    """Write what `mlx_lm.convert` makes of a model from the hub."""
    mlx_lm.convert(str(original), mlx_path=str(folder), quantize=True, q_group_size=32)
    (folder / "README.md").write_text(f"---\n{json.dumps(CARD | {'base_model': ORIGINAL})}\n---\n")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def written_by_torch(folder: Path) -> Path:
    """Write the same numbers with another framework's mark."""
    mx.save_safetensors(str(folder / "model.safetensors"), read_tensors(folder), metadata={"format": "pt"})
    return folder


def verifier(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]


def test_the_verifier_is_a_model_that_speculators_can_load(
    tmp_path: Path, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    original = written_by_torch(tiny_target_folder(tmp_path / "original"))
    folder = quantized(tmp_path / "tiny-4bit", original)
    online.put(ORIGINAL, files_of(original))
    online.put("user/tiny-4bit", files_of(folder))
    save_eagle3(eagle3(load_target(original), draft_vocab=40), tmp_path / "a", target_name="tiny-4bit")
    cases = {
        "a card here": (str(folder), [], ORIGINAL),
        "a card there": ("user/tiny-4bit", [], ORIGINAL),
        "no conversion": (ORIGINAL, [], ORIGINAL),
        "given": (str(folder), ["--base-model", "owner/other"], "owner/other"),
        "a folder": (str(folder), ["--base-model", str(original)], str(original)),
        "a plain folder": (str(original), [], str(original)),
    }
    for name, (target, more, base) in cases.items():
        out = tmp_path / name
        convert(tmp_path / "a", "speculators", out, "--target", target, *more)
        assert verifier(out) == base, name
        printed = capsys.readouterr()
        assert "warning: the target's base model" not in printed.err
        assert f"verifier: {base}" in printed.err
        assert ("which only this machine has" in printed.err) == (name == "a plain folder")
        assert "EAGLE-MLX has read it back; the layout is that of speculators and vLLM" in printed.out
        assert json.loads((out / "config.json").read_text())["eagle_mlx"]["target"] == target.split(f"{tmp_path}/")[-1]
    convert(tmp_path / "a card here", "eagle3", tmp_path / "b")
    convert(tmp_path / "b", "speculators", tmp_path / "c", "--target", str(original))
    assert verifier(tmp_path / "c") == ORIGINAL, "it is kept where a layout has no place for it"


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_an_export_without_a_verifier_is_reported_as_not_loadable(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantized(tmp_path / "tiny-4bit", tiny_target_folder(tmp_path / "original"))
    (folder / "README.md").unlink()
    target = load_target(folder)
    if kind == "mtp":
        save_mtp(mtp(target, norm_output=True), tmp_path / "a")
    else:
        save_eagle3(eagle3(target, draft_vocab=40), tmp_path / "a")
    convert(tmp_path / "a", "speculators", tmp_path / "b", "--target", str(folder), "--no-check")
    assert verifier(tmp_path / "b") is None
    printed = capsys.readouterr()
    assert "speculators and vLLM cannot load the head; convert again with --base-model" in printed.err
    assert "has read it back; speculators and vLLM cannot load it without a verifier: convert again" in printed.out
    assert "trying the head" not in printed.err


@pytest.mark.parametrize("card", [True, False])
def test_a_base_model_that_mlx_has_quantized_is_refused(
    card: bool, tmp_path: Path, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantized(tmp_path / "tiny-4bit", tiny_target_folder(tmp_path / "original"))
    if not card:
        (folder / "README.md").unlink()
    online.put("user/tiny-4bit", files_of(folder))
    hub.resolve("user/tiny-4bit")
    instead = f"give {ORIGINAL}, which its card names" if card else "give the hub id or folder of the original model"
    save_eagle3(eagle3(load_target(folder), draft_vocab=40), tmp_path / "a")
    capsys.readouterr()
    for name in (str(folder), "user/tiny-4bit", "mlx-community/tiny-bf16"):
        assert main([str(tmp_path / "a"), "--to", "speculators", "--output", str(tmp_path / "out"),
                     "--target", str(folder), "--base-model", name]) == 2  # fmt: skip
        message = f"--base-model {name} is an MLX conversion, which speculators and vLLM cannot load"
        refused(message if name.startswith("mlx") else f"{message}; {instead}", tmp_path, capsys)


def test_a_base_model_of_another_width_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_eagle3(eagle3(tiny_target(), draft_vocab=40), tmp_path / "a")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 4096}))
    assert main([str(tmp_path / "a"), "--to", "speculators", "--output", str(tmp_path / "out"),
                 "--base-model", str(other)]) == 2  # fmt: skip
    refused(f"--base-model {other} has hidden states of 4096 numbers, but the head is for a model", tmp_path, capsys)


def test_the_trial_of_a_head_is_announced_and_shows_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    save_eagle3(eagle3(load_target(folder), draft_vocab=40), tmp_path / "a")
    convert(tmp_path / "a", "eagle3", tmp_path / "b", "--target", str(folder))
    printed = capsys.readouterr().err
    assert f"trying the head on {folder}: 4 answers of 64 tokens, which takes minutes with a large target" in printed
    assert re.search(r"trying the head: 100%.* (\d+)/\1 ", printed)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "peagle"])
def test_speculators_loads_an_export_without_options(kind: str, tmp_path: Path, online: hub_server.Hub) -> None:
    speculators = pytest.importorskip("speculators")
    original = written_by_torch(tiny_target_folder(tmp_path / "original"))
    folder = quantized(tmp_path / "tiny-4bit", original)
    online.put(ORIGINAL, files_of(original))
    target = load_target(folder)
    if kind == "mtp":
        save_mtp(mtp(target, norm_output=True), tmp_path / "a", target_name="tiny-4bit")
    else:
        make = eagle3 if kind == "eagle3" else peagle
        save_eagle3(make(target, draft_vocab=40), tmp_path / "a", target_name="tiny-4bit")
    convert(tmp_path / "a", "speculators", tmp_path / "b", "--target", str(folder))
    head = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "b"))
    for name, value in head.state_dict().items():
        assert not bool(value.isnan().any()), name
    assert head.config.speculators_config.verifier.name_or_path == ORIGINAL


def test_a_pytorch_eagle_1_head_becomes_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = eagle(TARGET, own_embedding=True)
    save_eagle(head, tmp_path / "a", dtype=mx.float32)
    what, storages = {}, {}
    for key, (name, value) in enumerate(read_tensors(tmp_path / "a").items()):
        strides = [1] * value.ndim
        for axis in range(value.ndim - 2, -1, -1):
            strides[axis] = strides[axis + 1] * value.shape[axis + 1]
        what[f"model.{name}"] = tensor(Storage("FloatStorage", str(key), value.size), 0, value.shape, tuple(strides))
        storages[f"s{key}"] = bytes(memoryview(value))
    (tmp_path / "b").mkdir()
    torch_file(tmp_path / "b" / "pytorch_model.bin", what, monkeypatch, **storages)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["eagle_fc_bias"], config["eagle_mlx"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "b", "eagle", tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["config.json", "model.safetensors"]
    tensors = [read_tensors(tmp_path / name) for name in "ac"]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(mx.array_equal(x, tensors[1][name]) for name, x in tensors[0].items())


def damaged(folder: Path, damage: str) -> Path:
    """Write a portable EAGLE-3 head with an error."""
    save_eagle3(eagle3(TARGET, draft_vocab=40), folder)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
        return folder
    if damage == "code":
        weights.unlink()
        with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
            archive.writestr("x/data.pkl", pickle.dumps(os.getcwd))
        return folder
    tensors = read_tensors(folder)
    if damage == "missing":
        del tensors["fc.weight"]
    elif damage == "extra":
        tensors["colour"] = mx.zeros(3)
    elif damage == "shape":
        tensors["norm.weight"] = mx.ones(7)
    elif damage == "nan":
        tensors["norm.weight"] = mx.full(32, float("nan"))
    elif damage == "d2t":
        tensors["d2t"] = tensors["d2t"] + 99
    mx.eval(tensors)
    mx.save_safetensors(str(weights), tensors)
    return folder


@pytest.mark.parametrize(("make", "layout", "save"), [(eagle, "eagle", save_eagle), (eagle3, "eagle3", save_eagle3)])
def test_a_quantized_head_stays_quantized_and_is_for_mlx_only(
    make: Any, layout: str, save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make(TARGET)
    quantize(head, 4, 32)
    save(head, tmp_path / "a", dtype=mx.float16)
    convert(tmp_path / "a", layout, tmp_path / "b")
    assert same_files(tmp_path / "a", tmp_path / "b")
    printed = capsys.readouterr().out
    assert "EAGLE-MLX has read it back; other servers cannot read it, because MLX quantized it" in printed
    assert "SGLang" not in printed
    assert main([str(tmp_path / "a"), "--to", "speculators", "--output", str(tmp_path / "c")]) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "model.safetensors is damaged or cut short"),
        ("code", "asks to run"),
        ("missing", "missing: fc.weight"),
        ("extra", "not known to this format: colour"),
        ("shape", "norm.weight has shape (7,), expected (32,)"),
        ("nan", "have NaN or infinity: norm.weight"),
        ("d2t", "d2t in"),
    ],
)
def test_a_damaged_head_is_refused_and_nothing_written(
    damage: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = damaged(tmp_path / "h", damage)
    assert main([str(source), "--to", "eagle3", "--output", str(tmp_path / "out")]) == 2
    refused(message, tmp_path, capsys)


def refused(message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check for one line that names the error, and no new files."""
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert printed.out == ""
    assert [path.name for path in folder.iterdir() if "out" in path.name] == []


def head_of(target: Target, kind: str, folder: Path) -> Path:
    save = {"eagle": save_eagle, "eagle3": save_eagle3, "mtp": save_mtp}[kind]
    make: Any = {"eagle": eagle, "eagle3": eagle3, "mtp": mtp}[kind]
    head = make(target)
    head.attach(target)
    save(head, folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        (
            "eagle",
            ["--to", "speculators"],
            "is an EAGLE-1 head, which cannot be written as speculators; --to can be ea",
        ),
        ("eagle3", ["--to", "mtp"], "--to can be eagle3 or speculators"),
        ("eagle3", ["--to", "speculators"], "name the target with --target"),
        ("eagle3", ["--to", "speculators", "--depth", "0"], "--depth must be between 1 and 20"),
        (
            "eagle3",
            ["--to", "speculators", "--base-model", "a/b/c"],
            "--base-model: 'a/b/c' is not a valid repository name",
        ),
        ("mtp", ["--to", "speculators"], "the speculators layout cannot express norm_output=False"),
        ("eagle3", ["--to", "speculators", "--target", "TARGET"], " expects a target of vocabulary 64 but"),
    ],
)
def test_unsupported_conversions_are_refused(
    kind: str, args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = head_of(TARGET, kind, tmp_path / "h")
    if "TARGET" in args:
        args = [*args[:-1], str(tiny_target_folder(tmp_path / "target"))]
    assert main([str(source), *args, "--output", str(tmp_path / "out")]) == 2
    refused(message, tmp_path, capsys)


@pytest.mark.parametrize("model", ["deepseek_v3", "glm4_moe", "mimo"])
def test_mtp_layers_that_speculators_does_not_support(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_mtp(mtp(TARGET, model_type=model, norm_output=True), tmp_path / "h")
    assert main([str(tmp_path / "h"), "--to", "speculators", "--output", str(tmp_path / "out")]) == 2
    refused(f"speculators has no MTP layer for {model}", tmp_path, capsys)


def test_an_existing_folder_is_replaced_only_with_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = head_of(TARGET, "eagle3", tmp_path / "h")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "config.json").write_text("precious")
    args = [str(source), "--to", "eagle3", "--output", str(tmp_path / "o")]
    assert main(args) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "o" / "config.json").read_text() == "precious"
    assert main([*args, "--overwrite"]) == 0
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_full_disk_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = head_of(TARGET, kind, tmp_path / "h")
    opened = Path.open

    def on_full_disk(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return opened(Path("/dev/full") if "w" in mode else self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", on_full_disk)
    assert main([str(source), "--to", kind, "--output", str(tmp_path / "out")]) == 2
    refused("No space left", tmp_path, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["h"]
