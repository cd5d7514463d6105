"""Which heads are found for a target, in which order, and what is known about published ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.catalog import embedded, head_search
from eagle_mlx.catalog.head_search import (
    PREFERRED,
    find_heads,
    known_heads,
    known_heads_for,
    load_found,
    records,
    register,
    where_mtp_layers_are,
)
from eagle_mlx.errors import EagleError
from eagle_mlx.heads import KINDS
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.hub import UNKNOWN, full_id
from eagle_mlx.target import fingerprint
from tests import hub_server
from tests.eagle_mlx import test_heads_golden as golden
from tests.fakes import EMBEDDED_TARGET, tiny_head, tiny_target, tiny_target_folder
from tests.full import diagonal

HEAD = {"config.json": b"{}", "model.safetensors": b"weights"}
QWEN = "mlx-community/Qwen3-8B-4bit"


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def head_folder(path: Path, seed: int = 0) -> Path:
    save_eagle3(tiny_head(tiny_target(tokenizer=True), seed), path, target_name="tiny")
    return path


def test_every_entry_of_the_table_has_its_sources() -> None:
    heads = known_heads()
    assert len(heads) > 50
    for head in heads:
        assert full_id(head.target)
        assert full_id(head.head)
        assert head.kind in KINDS
        assert head.source.startswith("https://")
    assert len({(head.target, head.head) for head in heads}) == len(heads)
    for head, row in zip(heads, em.hub.recorded_heads().values(), strict=True):
        assert (head.head, head.revision) == (row["head"], row["revision"])
        assert ("license_from" in row) == (row["license"] != UNKNOWN), row
        assert row["revision"] == UNKNOWN or re.fullmatch("[0-9a-f]{40}", row["revision"]), row
        assert row["size"] == UNKNOWN or re.fullmatch(r"[\d.]+ GB", row["size"]), row


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (QWEN, "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-8bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "openai/gpt-oss-20b"),
    ],
)
def test_published_heads_are_found_by_the_names_of_conversions(name: str, target: str) -> None:
    assert {head.target for head in known_heads_for((name,))} == {target}


def test_the_preferred_kind_comes_first_and_says_so() -> None:
    assert {head.kind for head in known_heads()} <= set(PREFERRED)
    kinds = [head.kind for head in known_heads_for((QWEN,))]
    assert list(dict.fromkeys(kinds)) == ["dspark", "dflash", "peagle", "eagle3"]
    first, *others = find_heads(QWEN)
    assert first.about.endswith("(DSpark before DFlash, P-EAGLE, EAGLE-3 by published τ for the cost of a draft)")
    assert not any("before" in head.about for head in others)


def test_nothing_is_known_of_other_models() -> None:
    assert known_heads_for(("mlx-community/SmolLM-135M-4bit", "someone/Qwen3-8B")) == []


def test_local_heads_come_first_by_tau(tmp_path: Path) -> None:
    for at, name in enumerate(("older", "newer")):
        assert register(head_folder(tmp_path / name, at), "Qwen/Qwen3-8B", "trained", acceptance_length=2 + at)
    heads = find_heads(QWEN)
    assert [head.head for head in heads[:2]] == [str(tmp_path / "newer"), str(tmp_path / "older")]
    assert heads[0].about == f"{tmp_path}/newer, trained here for Qwen/Qwen3-8B (τ 3.00)"
    assert all(head.here for head in heads[:2])
    assert not any(head.here for head in heads[2:])
    assert heads[2].head == known_heads_for((QWEN,))[0].head


@pytest.mark.parametrize(
    ("field", "value"),
    diagonal(
        ["head", "names", "origin", "fingerprint", "acceptance_length", "prompts", "made_at"],
        [["x"], {}, "x", None, [5], math.nan],
    ),
)
def test_a_damaged_record_does_not_stop_a_search(tmp_path: Path, registry: Path, field: str, value: Any) -> None:
    for name in ("good", "bad"):
        register(head_folder(tmp_path / name), QWEN, "trained", acceptance_length=2.0, prompts=80)
    file = next(file for file in (registry / "heads").iterdir() if json.loads(file.read_text())["head"].endswith("bad"))
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert str(tmp_path / "good") in [head.head for head in find_heads(QWEN)]


def test_the_included_target_has_the_included_head(tmp_path: Path) -> None:
    assert [head.head for head in find_heads(EMBEDDED_TARGET)] == [str(embedded("head"))]
    register(head_folder(tmp_path / "mine"), EMBEDDED_TARGET, "trained")
    assert [Path(head.head).name for head in find_heads(EMBEDDED_TARGET)] == ["head", "mine"], "measured ones first"
    register(tmp_path / "mine", EMBEDDED_TARGET, "trained", acceptance_length=3.6, prompts=80)
    assert [Path(head.head).name for head in find_heads(EMBEDDED_TARGET)] == ["mine", "head"]


@pytest.mark.parametrize(
    "name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "mlx-community/SmolLM2-135M-Instruct-8bit", None]
)
def test_the_head_for_a_real_model_is_found_by_its_names_and_in_its_folder(name: str | None, tmp_path: Path) -> None:
    converted = tiny_target_folder(tmp_path / "smollm2-135m-instruct")  # the name that `make real` gives to its folder
    [head] = find_heads(name or converted)
    assert head.head == str(embedded("smollm2-135m-instruct"))
    assert head.about == "the included head for HuggingFaceTB/SmolLM2-135M-Instruct (τ 2.08 on 48 prompts)"
    assert find_heads("someone/SmolLM2-135M-Instruct") == [], "another owner's may be another model"


def test_a_head_of_a_few_steps_is_not_offered(tmp_path: Path) -> None:
    for name, tau, prompts in (("good", 1.41, 96), ("test", 1.0, 3)):
        register(head_folder(tmp_path / name), EMBEDDED_TARGET, "trained", acceptance_length=tau, prompts=prompts)
    lines: list[str] = []
    first, second = find_heads(EMBEDDED_TARGET, say=lines.append)
    assert first.about == "the included head (τ 3.35 on 56 prompts)"
    assert second.about.endswith("good, trained here for target (τ 1.41 on 96 prompts)")
    [line] = lines
    assert "test, trained here for target (τ 1.00 on 3 prompts) is not offered: with a τ below 1.05 it costs" in line
    assert f"--head {tmp_path / 'test'}" in line


@pytest.mark.parametrize(
    ("heads", "order"),
    [
        ({"a": (2.4, 80), "b": (2.5, 3)}, "ab"),  # a few prompts do not beat many by a small margin
        ({"a": (1.41, 80), "b": (3.3, 3)}, "ba"),  # but by a large margin they do
        ({"a": (2.0, 80), "b": (2.1, 60)}, "ba"),
        ({"a": (2.0, 80), "b": (2.1, None)}, "ab"),  # the number of prompts is not known
        ({"a": (1.2, 4), "b": (None, None)}, "ab"),  # a head without τ comes last, however new
        ({"a": (1.2, 4), "b": (0.0, 0)}, "ab"),  # all prompts looped, so nothing was measured
        ({"a": (None, None), "b": (None, None)}, "ba"),
    ],
)
def test_the_best_measured_head_comes_first(
    tmp_path: Path, heads: dict[str, tuple[float | None, int | None]], order: str
) -> None:
    for name, (tau, prompts) in heads.items():
        register(head_folder(tmp_path / name), "someone/model", "trained", "", tau, prompts)
    assert "".join(Path(head.head).name for head in find_heads("someone/model")) == order


def test_a_tau_of_other_weights_comes_after_one_of_these(tmp_path: Path) -> None:
    for name, tau in (("old", 3.0), ("new", 2.8)):
        register(head_folder(tmp_path / name), "someone/model", "trained", name, tau, 80)
    assert [Path(head.head).name for head in find_heads("someone/model", "new")] == ["new", "old"]
    assert [Path(head.head).name for head in find_heads("someone/model")] == ["old", "new"]


def test_a_matching_fingerprint_comes_before_a_matching_name(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    same = fingerprint(em.load_target(folder))
    register(head_folder(tmp_path / "exact"), "elsewhere/model", "trained", same)
    register(head_folder(tmp_path / "named"), folder, "trained", "0" * 16)
    assert [Path(head.head).name for head in find_heads(folder, same)] == ["exact", "named"]
    assert [Path(head.head).name for head in find_heads(folder)] == ["named"]


def test_a_deleted_head_is_skipped(tmp_path: Path, registry: Path) -> None:
    head = head_folder(tmp_path / "head")
    register(head, "Qwen/Qwen3-8B", "trained")
    (registry / "heads" / "broken.json").write_text('{"head": 3')
    (registry / "heads" / "other.json").write_text(json.dumps({"head": "x", "names": ["y"], "how": "z", "field": 1}))
    assert [record.head for record in records()] == [str(head)]
    (head / "config.json").unlink()
    assert records() == []


def test_a_head_is_registered_once(tmp_path: Path) -> None:
    head = head_folder(tmp_path / "head")
    for tau in (1.5, 2.5):
        register(head, "Qwen/Qwen3-8B", "trained", acceptance_length=tau)
    assert [record.acceptance_length for record in records()] == [2.5]


def test_an_unwritable_cache_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "file"))
    assert not register(head_folder(tmp_path / "head"), "Qwen/Qwen3-8B", "trained")
    assert head_search.records() == []


def test_a_user_without_a_home_registers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGLE_MLX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert not register(head_folder(tmp_path / "head"), "Qwen/Qwen3-8B", "trained")
    assert head_search.records() == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert register(tmp_path / "head", "Qwen/Qwen3-8B", "trained")
    assert (tmp_path / "caches" / "eagle-mlx" / "heads").is_dir()


def test_published_heads_that_were_fetched_come_first(online: hub_server.Hub) -> None:
    first, other = (published.head for published in known_heads_for((QWEN,))[:2])
    assert [head.head for head in find_heads(QWEN)][:2] == [first, other]
    online.put(other, dict(HEAD))
    em.hub.resolve(other)
    requests = len(online.requests)
    heads = find_heads(QWEN)
    assert [(match.head, match.here) for match in heads[:2]] == [(other, True), (first, False)]
    assert "license unknown" in heads[0].about
    assert len(online.requests) == requests


def test_the_models_own_mtp_layers(tmp_path: Path) -> None:
    name = next(name for name in golden.NAMES if golden.published(name))
    golden.written(tmp_path / "model", name)
    [own] = find_heads(tmp_path / "model")
    assert (own.mode, own.about) == ("mtp", "model's own MTP layers")
    assert isinstance(load_found(own.head, golden.TARGET), MTPHead)
    assert golden.difference(name, load_found(own.head, golden.TARGET)) < golden.CLOSE


def test_a_conversion_without_its_mtp_layers_says_where_they_are(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "mine-4bit")
    config = json.loads((folder / "config.json").read_text())
    for more, command in (
        ({}, None),
        ({"mtp_num_hidden_layers": 1}, None),  # the model is not known
        ({"base_model": "someone/original"}, None),
        (
            {"mtp_num_hidden_layers": 1, "base_model": "someone/original"},
            "eagle-convert mtp --source someone/original --bits 4",
        ),
        (
            {"text_config": {"mtp_num_hidden_layers": 1}, "base_model": "someone/original"},
            "eagle-convert mtp --source someone/original --bits 4",
        ),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        assert where_mtp_layers_are(folder) == command


def test_the_folder_of_a_run_means_its_best_head(tmp_path: Path) -> None:
    head_folder(tmp_path / "run" / "best")
    assert load_found(tmp_path / "run", tiny_target(tokenizer=True)).aux_layers
    assert em.load_head(tmp_path / "run", tiny_target(tokenizer=True), check=False).aux_layers
    with pytest.raises(EagleError):
        load_found(tmp_path, tiny_target(tokenizer=True))


def test_a_heads_folder_is_not_taken_for_a_model(tmp_path: Path) -> None:
    target = tiny_target(tokenizer=True)
    head = load_found(head_folder(tmp_path / "head"), target)
    assert head.aux_layers == em.load_head(tmp_path / "head", target, check=False).aux_layers
