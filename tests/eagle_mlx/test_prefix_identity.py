"""The disk tier identifies weights by all of their bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.disk.identity import hash_of_arrays
from tests.fakes import tiny_adapters, tiny_head, tiny_target, tiny_target_folder

TEXT = [(7 * i * i + 3 * i) % 90 + 1 for i in range(60)]
GREEDY = em.SamplingParams(max_tokens=12, ignore_eos=True)


def engine(target: em.Target, folder: Path | None, proposer: em.HeadProposer | None = None) -> em.Engine:
    made = em.Engine(
        target, proposer, policy=em.FixedPolicy(3), max_batch=2, prefix_cache_bytes=1 << 30 if folder else 0
    )
    if folder is not None:
        assert made.prefixes is not None
        made.prefixes.disk = DiskTier(folder, 1 << 30, target, proposer)
    return made


def answered(by: em.Engine) -> tuple[int, list[int]]:
    """Answer TEXT and write it. Return how many tokens were reused, and the answer."""
    row = by.prepare(TEXT, GREEDY)
    by.submit(row)
    while row.finish_reason is None:
        by.step()
    if by.prefixes is not None and by.prefixes.disk is not None:
        assert by.prefixes.disk.close(60)
    return row.cached_tokens, row.tokens


def embedding(target: em.Target) -> mx.array:
    found: mx.array = target.model.model.embed_tokens.weight  # type: ignore[union-attr]
    return found


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
def test_04_nothing_is_reused_when_one_embedding_row_was_changed_in_memory(
    tmp_path: Path, change: Callable[[em.Target, int], None], from_files: bool
) -> None:
    source = tiny_target_folder(tmp_path / "model") if from_files else None

    def load() -> em.Target:
        return em.load_target(source) if source is not None else tiny_target()

    first = engine(load(), tmp_path / "cache")
    assert answered(first)[0] == 0
    assert answered(engine(load(), tmp_path / "cache"))[0] == len(TEXT) - 2
    other, cold = load(), load()
    for each in (other, cold):
        change(each, TEXT[0])
    reused, said = answered(engine(other, tmp_path / "cache"))
    assert reused == 0
    assert said == answered(engine(cold, None))[1]


def test_04_nothing_is_reused_when_one_embedding_row_was_changed_in_a_copy_of_the_files(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "model")
    answered(engine(em.load_target(folder), tmp_path / "cache"))
    copy = tmp_path / "copy" / "model"
    shutil.copytree(folder, copy)
    assert answered(engine(em.load_target(copy), tmp_path / "cache"))[0] == len(TEXT) - 2, "it is the same model"
    weights = mx.load(str(copy / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["model.embed_tokens.weight"][TEXT[0]] = 0.5
    mx.save_safetensors(str(copy / "model.safetensors"), weights, metadata={"format": "mlx"})
    reused, said = answered(engine(em.load_target(copy), tmp_path / "cache"))
    assert reused == 0
    assert said == answered(engine(em.load_target(copy), None))[1]


def test_04_nothing_is_reused_with_other_adapters_types_or_heads(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "model")

    def loaded() -> em.Target:
        return em.load_target(folder)

    answered(engine(loaded(), tmp_path / "cache"))
    adapted = em.load_target(folder, adapter_path=tiny_adapters(tmp_path / "adapters"))
    narrow = em.load_target(folder, mx.bfloat16)
    assert answered(engine(adapted, tmp_path / "cache"))[0] == 0
    assert answered(engine(narrow, tmp_path / "cache"))[0] == 0
    one, same, changed = (em.HeadProposer(tiny_head(loaded())) for _ in range(3))
    weight = changed.head.fc.weight  # type: ignore[attr-defined]
    weight[0, 0] = weight[0, 0] + 1
    assert answered(engine(loaded(), tmp_path / "cache", one))[0] == 0
    assert answered(engine(loaded(), tmp_path / "cache", same))[0] > 0
    assert answered(engine(loaded(), tmp_path / "cache", changed))[0] == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8])
def test_04_every_bit_of_an_array_counts(dtype: mx.Dtype) -> None:
    import mlx.nn as nn

    class Holder(nn.Module):
        def __init__(self, weight: mx.array):
            super().__init__()
            self.weight = weight

    before = mx.zeros((3, 5000), mx.uint8)
    found = set()
    for place in (None, (0, 0), (1, 2501), (2, 4999)):
        x = mx.array(before)
        if place is not None:
            x[place] = 1
        found.add(hash_of_arrays(Holder(x.view(dtype))))
    found.add(hash_of_arrays(Holder(before.reshape(5, 3000).view(dtype))))
    assert len(found) == 5
