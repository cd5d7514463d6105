"""The disk tier: an engine goes on from files as if it had read the text itself, and from damaged ones not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3

import eagle_mlx as em
from eagle_mlx.engine.disk import DiskTier, default_bytes
from eagle_mlx.engine.prefix_tree import PrefixTree
from eagle_mlx.errors import ConfigError
from eagle_mlx.request_state import RequestState
from tests.architectures import tiny_model
from tests.fakes import randomize, tiny_config, tiny_head, tiny_target
from tests.full import diagonal, in_full

MANY = 1 << 30
TEXT = [(7 * i * i + 3 * i) % 90 + 1 for i in range(150)]
SYSTEM = 100
"""Tokens of TEXT that other prompts begin with."""
GREEDY = em.SamplingParams(max_tokens=8, ignore_eos=True)
SEEDED = em.SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=7)
KINDS = ["full", "quantised", "gemma3_text", "qwen3_next", "mamba2"]


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts have several."""
    monkeypatch.setattr("eagle_mlx.engine.disk.index.BLOCK", 32)


@cache
def target(kind: str, seed: int = 0) -> em.Target:
    if kind == "full":
        return tiny_target(seed)
    wide = {**tiny_config(), "head_dim": 64}
    model = qwen3.Model(qwen3.ModelArgs(**wide)) if kind == "quantised" else tiny_model(kind)  # type: ignore[arg-type]
    randomize(model, seed, 0.2)
    return em.Target(model, name=kind)


def engine(folder: Path | None, kind: str = "full", drafts: str = "none", seed: int = 0, **more: Any) -> em.Engine:
    """With files in this folder, or none and cold."""
    which, bits = target(kind, seed), 8 if kind == "quantised" else None
    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "head": lambda: em.HeadProposer(tiny_head(which)),
        "hybrid": lambda: em.HybridProposer(em.HeadProposer(tiny_head(which)), em.NgramProposer()),
        "draft": lambda: em.DraftModelProposer(which),
    }
    proposer = makers[drafts]()
    made = em.Engine(which, proposer, em.FixedPolicy(3), 2, prefix_cache_bytes=MANY if folder else 0, kv_bits=bits)
    if folder is not None:
        assert made.prefixes is not None
        made.prefixes.disk = DiskTier(
            folder, more.get("limit", MANY), which, proposer, bits, more.get("say", said_of(()))
        )
    return made


def said_of(allowed: Sequence[str], heard: list[str] | None = None) -> Callable[[str], None]:
    """What the tier has to say, of which nothing else may be heard."""

    def say(text: str) -> None:
        assert any(each in text for each in allowed), text
        if heard is not None:
            heard.append(text)

    return say


def disk(of: em.Engine) -> DiskTier:
    assert of.prefixes is not None
    assert of.prefixes.disk is not None
    return of.prefixes.disk


def answered(
    by: em.Engine, prompt: Sequence[int], params: em.SamplingParams = GREEDY, ends: Sequence[int] = ()
) -> RequestState:
    row = by.prepare(list(prompt), params, ends)
    by.submit(row)
    while row.finish_reason is None:
        by.step()
    return row


def written(by: em.Engine) -> None:
    assert disk(by).close(60)


@pytest.mark.parametrize("kind", KINDS)
def test_16_files_of_a_namespace_are_of_no_use_to_another(tmp_path: Path, kind: str) -> None:
    prompt = list(range(40))

    def cached(by: em.Engine, namespace: str) -> int:
        row = by.prepare(prompt, GREEDY, namespace=namespace)
        by.submit(row)
        while row.finish_reason is None:
            by.step()
        return row.cached_tokens

    first = engine(tmp_path, kind)
    assert [cached(first, each) for each in ("a", "b", "")] == [0, 0, 0]
    assert min(cached(first, each) for each in ("a", "b", "")) > 20
    written(first)
    again = engine(tmp_path, kind)
    assert [cached(again, each) > 20 for each in ("c", "b", "a", "")] == [False, True, True, True]


@pytest.mark.parametrize(
    ("kind", "drafts", "params"), diagonal(KINDS, ["none", "head", "draft", "hybrid"], [GREEDY, SEEDED])
)
def test_a_new_engine_goes_on_where_the_old_one_was(
    tmp_path: Path, kind: str, drafts: str, params: em.SamplingParams
) -> None:
    drafts = drafts if kind == "full" or drafts in ("head", "hybrid") else "none"
    first = engine(tmp_path, kind, drafts)
    said = answered(first, TEXT, params, (SYSTEM,)).tokens
    written(first)
    for prompt in ([*TEXT, *said, 1, 2, 3], [*TEXT[:SYSTEM], 5, 6, 7, 8]):
        again, cold = engine(tmp_path, kind, drafts), engine(None, kind, drafts)
        got, wanted = answered(again, prompt, params), answered(cold, prompt, params)
        assert (got.tokens, got.accepted_by_position) == (wanted.tokens, wanted.accepted_by_position)
        assert len(prompt) - got.cached_tokens <= 0.1 * len(prompt)
        assert (disk(again).hits, disk(again).tokens) == (1, got.cached_tokens)
        written(again)


@pytest.mark.parametrize("kind", ["full", "gemma3_text"])
def test_others_decode_while_a_text_is_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first = engine(tmp_path, kind)
    answered(first, TEXT)
    written(first)
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.STEP_BYTES", 1)  # a block a step
    again = engine(tmp_path, kind)
    other = again.prepare(TEXT[::-1][:20], em.SamplingParams(max_tokens=40, ignore_eos=True))
    row = again.prepare(TEXT, GREEDY)
    again.submit(other)
    while not other.tokens:
        again.step()
    again.submit(row)
    said = list[int]()
    while not row.tokens:
        again.step()
        said.append(len(other.tokens))
    assert len(set(said)) >= 4
    while not again.idle:
        again.step()
    assert row.cached_tokens == len(TEXT) - 2
    assert row.tokens == answered(engine(None, kind), TEXT).tokens
    assert not disk(again)._ahead


def test_what_was_read_for_a_request_that_is_cancelled_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "qwen3_next"  # whose blocks wait until all are there
    first = engine(tmp_path, kind)
    answered(first, TEXT)
    written(first)
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.STEP_BYTES", 1)
    again = engine(tmp_path, kind)
    row = again.prepare(TEXT, GREEDY)
    again.submit(row)
    while not disk(again)._ahead:
        again.step()
    again.cancel(row)
    assert not disk(again)._ahead


def test_what_memory_has_is_not_read(tmp_path: Path) -> None:
    busy = engine(tmp_path)
    said = answered(busy, TEXT).tokens
    before = answered(busy, [*TEXT, *said, 1, 2, 3])
    assert before.cached_tokens > len(TEXT)
    assert (disk(busy).hits, disk(busy).bytes_read) == (0, 0)


def test_only_what_memory_lacks_is_read(tmp_path: Path) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    again = engine(tmp_path)
    answered(again, TEXT[:64])
    begun = disk(again).bytes_read
    got = answered(again, TEXT)
    assert got.cached_tokens == len(TEXT) - 2
    assert 0 < disk(again).bytes_read - begun < begun * 2
    assert got.tokens == answered(engine(None), TEXT).tokens


def test_texts_that_begin_alike_share_files_and_a_longer_one_takes_the_place_of_a_shorter(tmp_path: Path) -> None:
    busy, prompt = engine(tmp_path), TEXT[:70]
    for _ in range(3):
        prompt = [*prompt, *answered(busy, prompt).tokens, 1, 2, 3]
    answered(busy, [*TEXT[:66], 9, 9, 9])
    written(busy)
    starts = sorted(int(path.name.split("-")[1]) for path in disk(busy).folder.glob("block-*"))
    assert starts == [0, 32, 64, 64, 96]  # behind 64 positions there are two ways to go on
    assert len(disk(engine(tmp_path)).store) == len(starts)


@cache
def kept_text(root: str) -> tuple[Path, list[int], list[int]]:
    """A folder with files of TEXT, what was said behind it, and what is said behind that."""
    folder = Path(root) / "kept"
    first = engine(folder, "gemma3_text", "head")
    said = answered(first, TEXT, ends=(SYSTEM,)).tokens
    written(first)
    return folder, said, answered(engine(None, "gemma3_text", "head"), [*TEXT, *said, 1, 2]).tokens


@settings(max_examples=in_full(60, 8))
@given(st.data())
def test_damaged_files_are_named_and_do_no_harm(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    kept, said, wanted = kept_text(str(tmp_path_factory.getbasetemp()))
    folder = tmp_path_factory.mktemp("damaged") / "cache"
    shutil.copytree(kept, folder)
    path = data.draw(st.sampled_from(sorted(folder.glob("*/block-*")) + sorted(folder.glob("*/place-*"))))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 400))
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    heard = list[str]()
    again = engine(folder, "gemma3_text", "head", say=said_of(["passed over and deleted"], heard))
    assert answered(again, [*TEXT, *said, 1, 2]).tokens == wanted
    of_use = path.name.startswith("block") or disk(again).store.passed_over
    if of_use:
        assert disk(again).store.passed_over == len(heard) == 1
        assert path.name in heard[0]
    written(again)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "drafts", "seed"), [("full", "none", 1), ("full", "head", 0), ("quantised", "none", 0)]
)
def test_what_another_model_has_written_is_never_read(tmp_path: Path, kind: str, drafts: str, seed: int) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    other = engine(tmp_path, kind, drafts, seed)
    assert disk(other).folder != disk(first).folder
    got = answered(other, TEXT)
    assert (got.cached_tokens, disk(other).hits) == (0, 0)
    assert got.tokens == answered(engine(None, kind, drafts, seed), TEXT).tokens


def test_files_of_another_text_under_a_texts_name_are_passed_over(tmp_path: Path) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    answered(first, TEXT[::-1])
    written(first)
    a, b = sorted(disk(first).folder.glob("block-00000000-*"))
    a.write_bytes(b.read_bytes())
    heard = list[str]()
    again = engine(tmp_path, say=said_of(["does not go with its name"], heard))
    assert answered(again, TEXT).tokens == answered(engine(None), TEXT).tokens
    assert answered(again, TEXT[::-1]).tokens == answered(engine(None), TEXT[::-1]).tokens
    assert len(heard) == disk(again).store.passed_over == 1


def test_bytes_are_bounded_over_all_models_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").write_bytes(b"x" * 1000)
    other = engine(tmp_path, seed=1)
    answered(other, TEXT)
    written(other)
    [foreign] = tmp_path.glob("*/")
    one = disk(other).store.nbytes
    prompts = [[last, *TEXT[1:]] for last in range(5)]
    busy = engine(tmp_path, limit=int(2.5 * one))
    for prompt in prompts:
        answered(busy, prompt)
    written(busy)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= 2.5 * one
    assert not list(foreign.glob("*.safetensors"))
    assert (tmp_path / "mine.safetensors").exists()
    cached = [answered(engine(tmp_path), prompt).cached_tokens for prompt in prompts]
    assert cached[4] == cached[3] == len(TEXT) - 2
    assert cached[0] == cached[1] == 0
    smaller = disk(engine(tmp_path, limit=int(1.2 * one)))  # a limit that is less at the next start holds from there on
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= 1.2 * one
    assert smaller.store.nbytes <= 1.2 * one


def test_of_a_text_that_must_make_room_the_end_goes_first(tmp_path: Path) -> None:
    busy = engine(tmp_path)
    answered(busy, TEXT)
    written(busy)
    engine(tmp_path, limit=int(0.6 * disk(busy).store.nbytes))
    got = answered(engine(tmp_path), TEXT)
    assert 0 < got.cached_tokens < len(TEXT) // 2 + 32


def test_a_full_disk_is_told_once_and_nobody_is_kept_from_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[str]()
    busy = engine(tmp_path, say=said_of(["No space left on device"], heard))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("eagle_mlx.engine.disk.file.os.write", full)
    for prompt in (TEXT, TEXT[::-1]):
        assert answered(busy, prompt).tokens == answered(engine(None), prompt).tokens
    written(busy)
    assert len(heard) == 1
    assert not list(disk(busy).folder.glob("*block*"))


def test_a_file_that_cannot_be_opened_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    heard = list[str]()
    again = engine(tmp_path, say=said_of(["Too many open files"], heard))
    with monkeypatch.context() as patched:

        def exhausted(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        patched.setattr("eagle_mlx.engine.disk.file.read", exhausted)
        assert answered(again, TEXT).tokens == answered(engine(None), TEXT).tokens
    assert len(heard) == disk(again).store.passed_over > 0
    assert answered(engine(tmp_path), TEXT).cached_tokens == len(TEXT) - 2


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    heard = list[str]()
    busy = engine(tmp_path / "file" / "below", say=said_of(["cannot write"], heard))
    assert answered(busy, TEXT).tokens == answered(engine(None), TEXT).tokens
    written(busy)
    assert 1 <= len(heard) <= 2
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        engine(tmp_path / "file")


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """What one deletes the other takes for not there; what both write is the same file."""
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    one, two = engine(tmp_path), engine(tmp_path)
    for path in sorted(disk(two).folder.glob("block-*"))[2:]:
        path.unlink()
    got = answered(one, TEXT)
    assert got.cached_tokens == 64
    assert got.tokens == answered(engine(None), TEXT).tokens
    answered(two, [*TEXT, 1, 2, 3])
    written(one)
    written(two)
    assert answered(engine(tmp_path), [*TEXT, 1, 2, 3, 4]).cached_tokens >= len(TEXT)
    assert disk(one).store.passed_over == disk(two).store.passed_over == 0


def test_a_text_too_large_for_memory_is_left_on_the_disk(tmp_path: Path) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    again = engine(tmp_path)
    assert again.prefixes is not None
    again.prefixes.capacity = 1000
    got = answered(again, TEXT)
    assert (got.cached_tokens, disk(again).bytes_read) == (0, 0)


def test_what_fails_while_files_are_read_costs_the_reading_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine(tmp_path)
    answered(first, TEXT)
    written(first)
    again, real, calls = engine(tmp_path), PrefixTree.insert, count()

    def short_of_memory(self: PrefixTree[Any, Any], *args: Any) -> bool:
        done = real(self, *args)
        if next(calls) == 0:
            raise MemoryError("no room left")
        return done

    monkeypatch.setattr(PrefixTree, "insert", short_of_memory)
    wanted = answered(engine(None), TEXT).tokens
    for cached in (0, len(TEXT) - 2):
        got = answered(again, TEXT)
        assert (got.cached_tokens, got.tokens) == (cached, wanted)
    assert [record.message for record in caplog.records] == [
        "what files hold of a prompt could not be taken over; it is read anew"
    ]


def test_what_a_third_partys_proposer_keeps_is_refused_at_the_start(tmp_path: Path) -> None:
    class Other(em.HeadProposer):
        pass

    class Foreign:
        name, aux_layers = "foreign", (1,)

    which = target("full")
    DiskTier(tmp_path, MANY, which, Other(tiny_head(which)))
    with pytest.raises(ConfigError, match="what foreign keeps of a text cannot be written"):
        DiskTier(tmp_path, MANY, which, Foreign())  # type: ignore[arg-type]


def test_by_default_a_share_of_the_disk(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    found = default_bytes(tmp_path / "not" / "there")
    assert 0 < found <= usage.total // 10
    assert found <= usage.free


SICK = 95
"""A token that `sickly` targets read as no number. It is not in TEXT."""


def sickly(name: str) -> em.Target:
    model: Any = tiny_model(name)
    randomize(model, 0, 0.2)
    model.model.embed_tokens.weight[SICK] = mx.nan
    return em.Target(model, name=name)


@pytest.mark.parametrize(("name", "behind"), diagonal(["gemma3_text", "gpt_oss", "qwen3_next"], [1, 9, 40]))
def test_3_nothing_is_kept_that_is_not_a_number(tmp_path: Path, name: str, behind: int) -> None:
    """A prompt goes on with a token that reads as none. Later prompts that begin like it read well, also from files."""
    which = sickly(name)
    params = em.SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={SICK: -1e4})
    wanted = answered(em.Engine(which), TEXT[:120], params).tokens

    def made() -> em.Engine:
        one = em.Engine(which, max_batch=2, prefix_cache_bytes=MANY)
        assert one.prefixes is not None
        one.prefixes.disk = DiskTier(tmp_path, MANY, which, None, None, said_of(()))
        return one

    first = made()
    bad = answered(first, [*TEXT[:SYSTEM], *TEXT[:behind], SICK, *TEXT[:20]], params, (SYSTEM,))
    assert "NaN" in (bad.error or "")
    got = answered(first, TEXT[:120], params, (SYSTEM,))
    assert (got.error, got.tokens) == (None, wanted)
    written(first)
    second = made()
    again = answered(second, TEXT[:120], params)
    assert (again.error, again.tokens) == (None, wanted), again.cached_tokens
    assert again.cached_tokens > 0
    written(second)
