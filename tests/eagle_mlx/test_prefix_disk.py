"""The disk tier: an engine continues from files as if it had read the text itself, and never from damaged ones."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.engine.disk import DiskTier, default_bytes
from eagle_mlx.engine.disk.snapshot_file import blocks_of, state_at
from eagle_mlx.engine.disk.store import Store
from eagle_mlx.engine.prefix_tree import PrefixTree, common, keys_of
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import locked
from tests.architectures import tiny_model
from tests.disk_tier import (
    GREEDY,
    KINDS,
    MANY,
    SEEDED,
    SYSTEM,
    TEXT,
    THRESHOLD,
    answered,
    blocks,
    cold,
    disk,
    engine,
    nbytes,
    said_of,
    target,
    with_text,
    written,
)
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import randomize, tiny_head
from tests.full import diagonal, in_full, in_turn


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks short, so that short texts have several."""
    monkeypatch.setattr("eagle_mlx.engine.disk.snapshot_file.BLOCK", 32)


WHOLE = len(TEXT) // 32 * 32
"""Positions of TEXT in whole blocks, which is all that is saved without windows and states."""


@pytest.mark.parametrize("kind", in_turn(KINDS, of=3))
def test_namespaces_do_not_share_files(tmp_path: Path, kind: str) -> None:
    prompt = list(range(40))

    def cached(by: em.Engine, namespace: str) -> int:
        row = by.prepare(prompt, em.SamplingParams(max_tokens=1), namespace=namespace)
        by.submit(row)
        while row.finish_reason is None:
            by.step()
        return row.counts.cached_tokens

    first = engine(tmp_path, kind)
    assert [cached(first, client) for client in ("a", "b", "")] == [0, 0, 0]
    assert min(cached(first, client) for client in ("a", "b", "")) > 20
    written(first)
    again = engine(tmp_path, kind)
    assert [cached(again, client) > 20 for client in ("c", "b", "a", "")] == [False, True, True, True]


@pytest.mark.parametrize(("kind", "drafts", "params"), diagonal(KINDS, PROPOSERS, [GREEDY, SEEDED, THRESHOLD]))
def test_a_new_engine_continues_from_the_files_of_the_old_one(
    tmp_path: Path, kind: str, drafts: str, params: em.SamplingParams
) -> None:
    drafts = "none" if kind != "full" and drafts == "draft model" else drafts
    first = engine(tmp_path, kind, drafts)
    tokens = answered(first, TEXT, params, (SYSTEM,)).tokens
    written(first)
    prompts = [[*TEXT, *tokens, 1, 2, 3], [*TEXT[:SYSTEM], 5, 6, 7, 8]]
    for prompt in in_turn(prompts, len(drafts) % 2):
        again, without = engine(tmp_path, kind, drafts), engine(None, kind, drafts)
        got, wanted = answered(again, prompt, params), answered(without, prompt, params)
        assert (got.tokens, got.counts.accepted_by_position) == (wanted.tokens, wanted.counts.accepted_by_position)
        assert len(prompt) - got.counts.cached_tokens <= (34 if kind in ("full", "quantised") else 10)
        assert (disk(again).hits, disk(again).tokens) == (1, got.counts.cached_tokens)
        written(again)


@pytest.mark.parametrize("kind", ["full", "gemma3_text"])
def test_others_decode_while_a_text_is_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with_text(tmp_path, kind)
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.STEP_BYTES", 1)  # one block per step
    again = engine(tmp_path, kind)
    other = again.prepare(TEXT[::-1][:20], em.SamplingParams(max_tokens=40, ignore_eos=True))
    row = again.prepare(TEXT, GREEDY)
    again.submit(other)
    while not other.tokens:
        again.step()
    again.submit(row)
    lengths = list[int]()
    while not row.tokens:
        again.step()
        lengths.append(len(other.tokens))
    assert len(set(lengths)) >= 4
    while not again.idle:
        again.step()
    assert row.counts.cached_tokens == (WHOLE if kind == "full" else len(TEXT) - 2)
    assert row.tokens == cold(tuple(TEXT), kind)
    assert not disk(again).ahead


def test_blocks_read_for_a_cancelled_request_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "qwen3_next"  # its blocks wait until all are there
    with_text(tmp_path, kind)
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.STEP_BYTES", 1)
    again = engine(tmp_path, kind)
    row = again.prepare(TEXT, GREEDY)
    again.submit(row)
    while not any(disk(again).ahead.values()):
        again.step()
    again.cancel(row)
    assert not disk(again).ahead


def test_only_blocks_that_memory_lacks_are_read(tmp_path: Path) -> None:
    tokens = with_text(tmp_path)
    again = engine(tmp_path)
    answered(again, TEXT[:100])
    begun = disk(again).bytes_read
    got = answered(again, TEXT)
    assert got.counts.cached_tokens == WHOLE
    assert 0 < disk(again).bytes_read - begun < begun
    assert got.tokens == cold(tuple(TEXT)) == tokens
    read = (disk(again).hits, disk(again).bytes_read)
    assert answered(again, [*TEXT, *tokens, 1, 2, 3]).counts.cached_tokens > len(TEXT)
    assert read == (disk(again).hits, disk(again).bytes_read), "memory has all of it"


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_a_state_is_read_without_blocks_that_memory_has(tmp_path: Path, kind: str) -> None:
    with_text(tmp_path, kind)
    again = engine(tmp_path, kind)
    answered(again, TEXT)
    begun = disk(again).bytes_read
    [state] = tmp_path.glob(f"*/state-{SYSTEM - 1:08d}-*")
    assert answered(again, [*TEXT[:SYSTEM], 1, 2, 3]).counts.cached_tokens == SYSTEM - 1
    assert disk(again).bytes_read - begun == state.stat().st_size
    assert not disk(again).ahead, "what was read stays only in the prefix cache"


def test_texts_share_the_files_of_what_they_share(tmp_path: Path) -> None:
    busy, prompt = engine(tmp_path), TEXT[:70]
    for _ in range(3):
        prompt = [*prompt, *answered(busy, prompt).tokens, 1, 2, 3]
    answered(busy, [*TEXT[:66], *[9] * 40])
    written(busy)
    ends = [int(path.name.split("-")[1]) for path in blocks(tmp_path)]
    assert ends == [32, 64, 96, 96]  # after 64 positions there are two continuations
    assert disk(engine(tmp_path)).nbytes == nbytes(tmp_path)


TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=16), max_size=6)


@pytest.mark.parametrize("kind", ["full", "mamba2"])
@settings(max_examples=in_full(100, 15))
@given(TEXTS, st.lists(st.integers(0, 1), min_size=2, max_size=18))
def test_the_longest_prefix_is_found(kind: str, texts: list[list[int]], prompt: list[int]) -> None:
    """Without states, that is the most whole blocks; else the longest text that the prompt begins with."""
    keys, wanted, model = keys_of(prompt), 0, "0" * 32
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as name:
        patched.setattr("eagle_mlx.engine.disk.snapshot_file.BLOCK", 4)
        patched.setattr("os.fsync", lambda _: None)
        patched.setattr("eagle_mlx.engine.disk.tier.identity", lambda *_: model)
        store, tier = Store(Path(name), MANY), DiskTier(Path(name), MANY, target(kind))
        for text in map(keys_of, texts):
            entries = list(blocks_of(text, model, ""))
            entries += [] if kind == "full" else [state_at(len(text), text, model, "", entries)]
            store.keep((), [(entry.path, lambda: b"x") for entry in entries])
            shared = common(text, keys)
            wanted = max(wanted, shared // 4 * 4 if kind == "full" else shared * (shared == len(text)))
        match = tier.find(keys)
        assert (match.length if match is not None else 0) == wanted
        assert match is None or match.nbytes == len(match.entries)
        assert tier.find(keys, "another") is None
        tier.close(10)


@settings(max_examples=in_full(60, 6))
@given(st.data())
def test_damaged_files_are_reported_and_do_no_harm(data: st.DataObject) -> None:
    kind, drafts = "gemma3_text", "head"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = with_text(folder, kind, drafts)
        path = data.draw(st.sampled_from(blocks(folder) + sorted(folder.glob("*/state-*"))))
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        else:
            at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 400))
            content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        heard = list[str]()
        again = engine(folder, kind, drafts, say=said_of(["skipped and deleted"], heard))
        prompt = [*TEXT, *tokens, 1, 2]
        assert answered(again, prompt).tokens == cold(tuple(prompt), kind, drafts)
        if path.name.startswith("block") or disk(again).passed_over:
            assert disk(again).passed_over == len(heard) == 1
            assert path.name in heard[0]
        written(again)


@pytest.mark.parametrize(
    ("kind", "drafts", "seed"), [("full", "none", 1), ("full", "head", 0), ("quantised", "none", 0)]
)
def test_files_of_another_model_are_never_read(tmp_path: Path, kind: str, drafts: str, seed: int) -> None:
    with_text(tmp_path)
    other = engine(tmp_path, kind, drafts, seed)
    assert disk(other).folder != blocks(tmp_path)[0].parent
    got = answered(other, TEXT)
    assert (got.counts.cached_tokens, disk(other).hits) == (0, 0)
    assert got.tokens == cold(tuple(TEXT), kind, drafts, seed)


def test_files_with_the_name_of_another_text_are_skipped(tmp_path: Path) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    answered(first, TEXT[::-1])
    written(first)
    a, b = blocks(tmp_path)[:2]
    a.write_bytes(b.read_bytes())
    heard = list[str]()
    again = engine(tmp_path, say=said_of(["skipped and deleted"], heard))
    for text in (TEXT, TEXT[::-1]):
        assert answered(again, text).tokens == cold(tuple(text))
    assert len(heard) == disk(again).passed_over == 1


def test_bytes_are_bounded_over_all_models_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    (tmp_path / "mine.prefix").write_bytes(b"x" * 1000)
    other = engine(tmp_path, seed=1)
    answered(other, TEXT)
    written(other)
    foreign, text_bytes = disk(other).folder, nbytes(tmp_path)
    prompts = [[last, *TEXT[1:]] for last in range(4)]
    busy = engine(tmp_path, limit=int(2.5 * text_bytes))
    for prompt in prompts:
        answered(busy, prompt)
    written(busy)
    assert nbytes(tmp_path) <= 2.5 * text_bytes
    assert not list(foreign.glob("*.prefix"))
    assert (tmp_path / "mine.prefix").exists()
    again = engine(tmp_path)
    cached = [answered(again, prompt, em.SamplingParams(max_tokens=1)).counts.cached_tokens for prompt in prompts]
    assert cached[3] == cached[2] == WHOLE
    written(again)
    assert cached[0] < len(TEXT) // 2 + 32
    smaller = disk(engine(tmp_path, limit=int(1.2 * text_bytes)))  # a smaller limit applies from the next start
    assert 0 < smaller.nbytes == nbytes(tmp_path) <= 1.2 * text_bytes


def test_the_end_of_a_text_is_removed_first(tmp_path: Path) -> None:
    with_text(tmp_path)
    got = answered(engine(tmp_path, limit=int(0.6 * nbytes(tmp_path))), TEXT)
    assert 0 < got.counts.cached_tokens < len(TEXT) // 2 + 32


def test_a_full_disk_is_reported_once_and_answers_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[str]()
    busy = engine(tmp_path, say=said_of(["No space left on device"], heard))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    for prompt in (TEXT, TEXT[::-1]):
        assert answered(busy, prompt).tokens == cold(tuple(prompt))
    written(busy)
    assert len(heard) == 1
    assert not list(disk(busy).folder.glob("*block*"))


def test_a_text_waits_once_to_be_written_and_not_behind_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(tmp_path)
    with locked(tmp_path, wait=True):  # the writer waits, too
        answered(first, TEXT)
        waiting = disk(first).bytes_waiting
        assert waiting > 0
        answered(first, TEXT)
        assert disk(first).bytes_waiting == waiting
        monkeypatch.setattr("eagle_mlx.engine.disk.tier.WAITING_BYTES", waiting - 1)
        answered(first, TEXT[::-1])
        assert disk(first).bytes_waiting == waiting
        assert disk(first).left_out == 1
    written(first)
    assert disk(first).bytes_waiting == 0
    assert nbytes(tmp_path) == disk(first).bytes_written > 0


def test_a_file_that_cannot_be_opened_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_text(tmp_path)
    heard = list[str]()
    again = engine(tmp_path, say=said_of(["Too many open files"], heard))
    with monkeypatch.context() as patched:

        def exhausted(*_: object) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        patched.setattr("pathlib.Path.read_bytes", exhausted)
        assert answered(again, TEXT).tokens == cold(tuple(TEXT))
    assert len(heard) == disk(again).passed_over > 0
    written(again)
    assert answered(engine(tmp_path), TEXT).counts.cached_tokens == WHOLE


def test_a_folder_that_cannot_be_created_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    heard = list[str]()
    busy = engine(tmp_path / "file" / "below", say=said_of(["cannot write"], heard))
    assert answered(busy, TEXT).tokens == cold(tuple(TEXT))
    written(busy)
    assert len(heard) == 1
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        engine(tmp_path / "file")


def test_two_engines_in_one_folder_find_each_others_files(tmp_path: Path) -> None:
    first, second = engine(tmp_path), engine(tmp_path)
    answered(first, TEXT)
    written(first)
    assert answered(second, [*TEXT, 1, 2, 3]).counts.cached_tokens == WHOLE
    written(second)
    assert answered(engine(tmp_path), [*TEXT, 1, 2, 3, 4]).counts.cached_tokens == WHOLE
    assert disk(first).passed_over == disk(second).passed_over == 0


def test_deleted_files_are_written_again(tmp_path: Path) -> None:
    """One missing block is noticed; the blocks after it are missing too."""
    with_text(tmp_path)
    before = [path.name for path in blocks(tmp_path)]
    again = engine(tmp_path)
    for path in blocks(tmp_path)[2:]:
        path.unlink()
    got = answered(again, TEXT)
    assert (got.counts.cached_tokens, got.tokens) == (64, cold(tuple(TEXT)))
    written(again)
    assert [path.name for path in blocks(tmp_path)] == before
    assert disk(again).passed_over == 0


def test_the_folder_can_be_deleted_at_any_time(tmp_path: Path) -> None:
    with_text(tmp_path / "cache")
    busy = engine(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert answered(busy, TEXT).tokens == cold(tuple(TEXT))
    written(busy)
    assert disk(busy).passed_over == 0
    assert answered(engine(tmp_path / "cache"), TEXT).counts.cached_tokens == WHOLE


def test_two_engines_keep_one_limit(tmp_path: Path) -> None:
    with_text(tmp_path)
    text_bytes = nbytes(tmp_path)
    engines = [engine(tmp_path, limit=int(2.5 * text_bytes)) for _ in range(2)]
    for number, by in enumerate(engines * 2):
        answered(by, [number + 1, *TEXT[1:]])
    for by in engines:
        written(by)
        assert text_bytes < nbytes(tmp_path) <= 2.5 * text_bytes


def test_fifos_and_folders_with_the_name_of_a_block_are_skipped(tmp_path: Path) -> None:
    with_text(tmp_path)
    first, second, third = blocks(tmp_path)[:3]
    second.unlink()
    os.mkfifo(second)
    third.unlink()
    third.mkdir()
    (third / "mine").touch()
    again = engine(tmp_path)
    assert answered(again, TEXT).counts.cached_tokens == 32
    assert disk(again).bytes_read == first.stat().st_size
    written(again)
    assert (third / "mine").exists()
    assert second.is_file(), "the block is written again, in the FIFO's place"
    assert answered(engine(tmp_path), TEXT).counts.cached_tokens == 64


@pytest.fixture
def read_only() -> Iterator[Callable[[], Path]]:
    """Yield a function that makes a folder with TEXT that this process can read but not write, even as root."""
    root, user = Path(tempfile.mkdtemp()), os.geteuid()
    root.chmod(0o755)

    def made() -> Path:
        with_text(root / "cache")
        for path in (root / "cache", *(root / "cache").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        if user == 0:
            os.seteuid(65534)
        return root / "cache"

    yield made
    if os.geteuid() != user:
        os.seteuid(user)
    for path in (root / "cache", *(root / "cache").rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(root)


@pytest.mark.parametrize("share", [0.5, 2])
def test_a_read_only_folder_is_read_and_reported_once(read_only: Callable[[], Path], share: float) -> None:
    heard = list[str]()
    folder = read_only()
    before = nbytes(folder)
    again = engine(folder, limit=int(share * before), say=said_of(["the prefix cache"], heard))
    assert answered(again, [*TEXT, 5, 6, 7]).counts.cached_tokens == WHOLE
    written(again)
    [message] = heard
    assert f"cannot write to or delete files in {folder}" in message
    assert nbytes(folder) == before


def test_a_disk_of_its_own_is_used_although_lost_and_found_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    assert answered(engine(tmp_path), TEXT).counts.cached_tokens


def test_a_text_too_large_for_memory_stays_on_disk(tmp_path: Path) -> None:
    with_text(tmp_path)
    again = engine(tmp_path)
    assert again.prefixes is not None
    again.prefixes.capacity = 1000
    got = answered(again, TEXT)
    assert (got.counts.cached_tokens, disk(again).bytes_read) == (0, 0)


def test_a_failure_while_files_are_read_costs_only_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_text(tmp_path)
    again, real, calls = engine(tmp_path), PrefixTree.insert, count()

    def short_of_memory(self: PrefixTree, *args: Any) -> bool:
        done = real(self, *args)
        if next(calls) == 0:
            raise MemoryError("no room left")
        return done

    monkeypatch.setattr(PrefixTree, "insert", short_of_memory)
    wanted = cold(tuple(TEXT))
    for cached in (0, len(TEXT) - 2):
        got = answered(again, TEXT)
        assert (got.counts.cached_tokens, got.tokens) == (cached, wanted)
    assert [record.message for record in caplog.records] == [
        "the prefix cache failed and is empty now; prompts are computed again"
    ]


def test_a_proposer_with_unknown_state_is_refused_at_the_start(tmp_path: Path) -> None:
    class Other(em.HeadProposer):
        pass

    class Foreign:
        name, aux_layers, head = "foreign", (1,), None

    which = target("full")
    DiskTier(tmp_path, MANY, which, Other(tiny_head(which)))
    with pytest.raises(ConfigError, match="the state of the proposer .foreign. cannot be saved"):
        DiskTier(tmp_path, MANY, which, Foreign())  # type: ignore[arg-type]


@pytest.mark.parametrize(("free", "limit"), [(900, 100), (180, 100), (100, 70), (0, 20)])
def test_by_default_the_limit_is_a_tenth_of_the_disk_or_half_of_what_is_free(
    tmp_path: Path, free: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's own files count as free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=1000, free=free))
    assert default_bytes(tmp_path / "not" / "there") == min(100, free // 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "one.prefix").write_bytes(bytes(40))
    assert default_bytes(tmp_path) == limit


SICK = 95
"""A token that `sickly` targets read as NaN. It is not in TEXT."""


def sickly(name: str) -> em.Target:
    model: Any = tiny_model(name)
    randomize(model, 0, 0.2)
    model.model.embed_tokens.weight[SICK] = mx.nan
    return em.Target(model, name=name)


@pytest.mark.parametrize(("name", "after"), diagonal(["gemma3_text", "gpt_oss", "qwen3_next"], [1, 9, 40]))
def test_nan_is_not_cached(tmp_path: Path, name: str, after: int) -> None:
    """A prompt continues with a token that reads as NaN. Later prompts with its prefix read well, also from files."""
    which = sickly(name)
    params = em.SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={SICK: -1e4})
    wanted = answered(em.Engine(which), TEXT[:120], params).tokens
    first = engine(tmp_path, which=which)
    bad = answered(first, [*TEXT[:SYSTEM], *TEXT[:after], SICK, *TEXT[:20]], params, (SYSTEM,))
    assert "NaN" in (bad.error or "")
    got = answered(first, TEXT[:120], params, (SYSTEM,))
    assert (got.error, got.tokens) == (None, wanted)
    written(first)
    second = engine(tmp_path, which=which)
    again = answered(second, TEXT[:120], params)
    assert (again.error, again.tokens) == (None, wanted), again.counts.cached_tokens
    assert again.counts.cached_tokens > 0
    written(second)
