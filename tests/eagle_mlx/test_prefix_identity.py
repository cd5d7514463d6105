"""The disk tier identifies weights by all of their bytes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import eagle_mlx as em
from eagle_mlx.adapters import Adapter
from eagle_mlx.engine.disk import DiskTier, snapshot_file
from eagle_mlx.engine.disk.snapshot_file import BLOCK, hash_of_arrays, identity
from tests.fakes import tiny_adapters, tiny_head, tiny_target, tiny_target_folder
from tests.full import FULL

TEXT = [(7 * i * i + 3 * i) % 90 + 1 for i in range(140)]
TARGET = tiny_target()
GREEDY = em.SamplingParams(max_tokens=12, ignore_eos=True)


def engine(target: em.Target, folder: Path | None, proposer: em.HeadProposer | None = None) -> em.Engine:
    if folder is None:
        return em.Engine(target, proposer, policy=em.FixedPolicy(3), max_batch=2)
    files = DiskTier(folder, 1 << 30, target, proposer)
    cached: dict[str, Any] = {"prefix_cache_bytes": 1 << 30, "prefix_files": files}
    return em.Engine(target, proposer, policy=em.FixedPolicy(3), max_batch=2, **cached)


def answered(by: em.Engine) -> tuple[int, list[int]]:
    """Answer TEXT and write it. Return how many tokens were reused, and the answer."""
    row = by.prepare(TEXT, GREEDY)
    by.submit(row)
    while row.finish_reason is None:
        by.step()
    if by.prefixes is not None and by.prefixes.disk is not None:
        assert by.prefixes.disk.close(60)
    return row.counts.cached_tokens, row.tokens


def embedding(target: em.Target) -> mx.array:
    weight: mx.array = target.model.model.embed_tokens.weight  # type: ignore[union-attr]
    return weight


def replace_row(target: em.Target, token: int) -> None:
    """Change one row of the embedding, which becomes a new array."""
    weight = embedding(target)
    rows = mx.arange(weight.shape[0])[:, None] == token
    target.model.model.embed_tokens.weight = mx.where(rows, 1 - weight, weight)  # type: ignore[union-attr]


def write_into_row(target: em.Target, token: int) -> None:
    """Change one row of the embedding in the same array."""
    weight = embedding(target)
    weight[token] = 1 - weight[token]


@pytest.mark.parametrize("change", [replace_row, write_into_row])
@pytest.mark.parametrize("from_files", [False, True])
def test_nothing_is_reused_when_one_embedding_row_was_changed_in_memory(
    tmp_path: Path, change: Callable[[em.Target, int], None], from_files: bool
) -> None:
    source = tiny_target_folder(tmp_path / "model") if from_files else None

    def load() -> em.Target:
        return em.load_target(source) if source is not None else tiny_target()

    first = engine(load(), tmp_path / "cache")
    assert answered(first)[0] == 0
    assert answered(engine(load(), tmp_path / "cache"))[0] == BLOCK
    other, cold = load(), load()
    for target in (other, cold):
        change(target, TEXT[0])
    reused, text = answered(engine(other, tmp_path / "cache"))
    assert reused == 0
    assert text == answered(engine(cold, None))[1]


def test_nothing_is_reused_when_one_embedding_row_was_changed_in_a_copy_of_the_files(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "model")
    answered(engine(em.load_target(folder), tmp_path / "cache"))
    copy = tmp_path / "copy" / "model"
    shutil.copytree(folder, copy)
    assert answered(engine(em.load_target(copy), tmp_path / "cache"))[0] == BLOCK, "it is the same model"
    weights = mx.load(str(copy / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["model.embed_tokens.weight"][TEXT[0]] = 0.5
    mx.save_safetensors(str(copy / "model.safetensors"), weights, metadata={"format": "mlx"})
    reused, text = answered(engine(em.load_target(copy), tmp_path / "cache"))
    assert reused == 0
    assert text == answered(engine(em.load_target(copy), None))[1]


def test_nothing_is_reused_with_other_adapters_types_or_heads(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "model")

    def loaded() -> em.Target:
        return em.load_target(folder)

    answered(engine(loaded(), tmp_path / "cache"))
    adapted = em.load_target(folder, adapter_path=tiny_adapters(tmp_path / "adapters"))
    narrow = em.load_target(folder, mx.bfloat16)
    assert answered(engine(adapted, tmp_path / "cache"))[0] == 0
    assert answered(engine(narrow, tmp_path / "cache"))[0] == 0
    original, same, changed = (em.HeadProposer(tiny_head(loaded())) for _ in range(3))
    weight = changed.head.fc.weight  # type: ignore[attr-defined]
    weight[0, 0] = weight[0, 0] + 1
    assert answered(engine(loaded(), tmp_path / "cache", original))[0] == 0
    assert answered(engine(loaded(), tmp_path / "cache", same))[0] > 0
    assert answered(engine(loaded(), tmp_path / "cache", changed))[0] == 0


class Holder(nn.Module):
    def __init__(self, weight: mx.array):
        super().__init__()
        self.weight = weight


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8])
def test_every_bit_of_an_array_counts(dtype: mx.Dtype) -> None:
    before = mx.zeros((3, 5000), mx.uint8)
    hashes = set()
    for place in (None, (0, 0), (1, 2501), (2, 4999)):
        x = mx.array(before)
        if place is not None:
            x[place] = 1
        hashes.add(hash_of_arrays(Holder(x.view(dtype))))
    hashes.add(hash_of_arrays(Holder(before.reshape(5, 3000).view(dtype))))
    assert len(hashes) == 5


@pytest.mark.skipif(not FULL, reason="it takes 2 GB of memory")
def test_an_array_may_have_two_gibibytes_or_more() -> None:
    """As have embeddings of Gemma in 16 bits, and experts of large models in 4."""
    assert len(hash_of_arrays(Holder(mx.zeros((2, 1 << 28), mx.uint32)))) == 32


def change_model(changed: pytest.MonkeyPatch, target: em.Target) -> None:
    model = type(target.model)
    changed.setitem(sys.modules, "another", sys.modules[model.__module__])
    changed.setattr(model, "__module__", "another")


def change_code(changed: pytest.MonkeyPatch, target: em.Target) -> None:
    changed.setattr(sys.modules[type(target.model).__module__], "__file__", __file__)


def change_config(changed: pytest.MonkeyPatch, target: em.Target) -> None:
    changed.setattr(target.model.args, "rope_theta", 9.0)


def change_last_weight(changed: pytest.MonkeyPatch, target: em.Target) -> None:
    weight = embedding(target)
    weight[-1, -1] = weight[-1, -1] + 1


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, em.Target], None]] = {
    "format": lambda changed, _: changed.setattr(snapshot_file, "FORMAT", "another"),
    "block": lambda changed, _: changed.setattr(snapshot_file, "BLOCK", snapshot_file.BLOCK + 1),
    "model": change_model,
    "code": change_code,
    "config": change_config,
    "weights": change_last_weight,
    "adapter": lambda changed, target: changed.setattr(target, "adapter", Adapter("a", "00")),
    "dtype": lambda changed, target: changed.setattr(target, "dtype", mx.bfloat16),
    "device": lambda changed, _: changed.setattr(mx, "default_device", lambda: "another"),
    "versions": lambda changed, _: changed.setattr(metadata, "version", lambda name: "9" * (name == "mlx-lm")),
}


@pytest.mark.parametrize("fact", CHANGES)
def test_an_identity_depends_on_each_fact_of_the_target(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    before = identity(target, None, None)
    assert identity(tiny_target(), None, None) == before
    with monkeypatch.context() as changed:
        CHANGES[fact](changed, target)
        assert identity(target, None, None) != before


@pytest.mark.parametrize("package", ["mlx", "mlx-lm", "eagle-mlx"])
def test_an_identity_depends_on_each_version(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, versions = identity(TARGET, None, None), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.9" if name == package else versions(name))
    assert identity(TARGET, None, None) != before


def test_an_identity_depends_on_the_bits_of_the_cache() -> None:
    assert len({identity(TARGET, None, bits) for bits in (None, 4, 8)}) == 3


class DeeperProposer(em.HeadProposer):
    aux_layers = (0, 1, 2)


def test_an_identity_depends_on_each_fact_of_a_proposer_that_reads_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert identity(TARGET, em.NgramProposer(), None) == identity(TARGET, None, None)
    head, other_weights, other_config = (tiny_head(TARGET) for _ in range(3))
    other_weights.fc.weight[-1, -1] = other_weights.fc.weight[-1, -1] + 1
    other_config.config = replace(other_config.config, rope_theta=9.0)
    proposers = [None, *map(em.HeadProposer, (head, other_weights, other_config))]
    renamed = em.HeadProposer(head)
    renamed.name = "another"
    windowed = [em.HeadProposer(head, size, sink) for size, sink in ((64, 0), (64, 4))]
    hybrid = em.HybridProposer(em.HeadProposer(head), em.NgramProposer())
    proposers += [renamed, DeeperProposer(head), *windowed]
    for proposer in (*proposers[1:], hybrid):
        proposer.bind(TARGET)
    identities = [identity(TARGET, proposer, None) for proposer in proposers]
    assert identity(TARGET, hybrid, None) == identities[1]
    monkeypatch.setattr(sys.modules[type(head).__module__], "__file__", __file__)
    identities.append(identity(TARGET, proposers[1], None))
    assert len(set(identities)) == len(identities)


def test_each_fact_of_an_identity_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dict[str, object]()
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **options: facts.update(value) or dumps(value, **options))
    identity(TARGET, None, None)
    assert set(facts) == {*CHANGES, "kv_bits", "proposer"}
