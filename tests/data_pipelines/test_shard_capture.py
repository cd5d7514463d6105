"""Captures into shards have the same bytes after interruption, continuation, damage and repair."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.data_pipelines import ShardCapture, capture
from eagle_mlx.errors import OutputError, ShardError, TargetError
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import UNFINISHED, Manifest, ShardReader, ShardWriter, unfinished_folder
from tests.data_pipelines.rows import AUX, conversations
from tests.fakes import tiny_target
from tests.forks import Fork
from tests.full import in_full, some

TARGET = tiny_target()
SHARDS = 10


def plan(bits: int = 16, batch_tokens: int = 64, count: int = 60) -> ShardCapture:
    return ShardCapture(TARGET, AUX, conversations(count), bits, batch_tokens, tokens_per_shard=100)


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "s"
    with plan().open(folder) as shards:
        plan().run(shards)
    return content(folder)


def test_the_order_is_that_of_capture(tmp_path: Path) -> None:
    with plan().open(tmp_path / "s") as shards:
        plan().run(shards)
    expected = list(capture(TARGET, AUX, conversations(60), 64))
    for stored, sample in zip(ShardReader(tmp_path / "s"), expected, strict=True):
        assert stored.tokens.tolist() == sample.tokens.tolist()
        assert (stored.states.features == sample.states.features).all()
        assert (stored.states.last == sample.states.last).all()


class InMemory:
    """Collects shards in memory."""

    def __init__(self, files: dict[int, object]):
        self.files, self.written = files, dict[int, list[Example]]()

    def write(self, index: int, samples: list[Example]) -> None:
        self.written[index] = samples


@cache
def in_memory(batch_tokens: int) -> InMemory:
    """Return all shards."""
    every = InMemory({})
    plan(batch_tokens=batch_tokens).run(every)  # type: ignore[arg-type]
    return every


@settings(max_examples=some(15))
@given(st.sets(st.integers(0, 10)), st.sampled_from([1, 64, 256]))
def test_any_shard_comes_out_the_same_by_itself(there: set[int], batch_tokens: int) -> None:
    captured = plan(batch_tokens=batch_tokens)
    assert len(captured) == {1: 11, 64: SHARDS, 256: 5}[batch_tokens]
    every, some = in_memory(batch_tokens), InMemory(dict.fromkeys(there))
    captured.run(some)  # type: ignore[arg-type]
    assert sorted(some.written) == captured.missing(some) == sorted(set(range(len(captured))) - there)  # type: ignore[arg-type]
    assert captured.tokens(some.written) == sum(len(s.tokens) for shard in some.written.values() for s in shard)
    for index, samples in some.written.items():
        for stored, expected in zip(samples, every.written[index], strict=True):
            assert stored.tokens.tobytes() == expected.tokens.tobytes()
            assert (
                stored.states.features.tobytes() + stored.states.last.tobytes()
                == expected.states.features.tobytes() + expected.states.last.tobytes()
            )


def whole_shards(folder: Path) -> int:
    """Return the number of shards recorded by an unfinished capture."""
    path = unfinished_folder(folder) / UNFINISHED
    return len(Manifest.read(path).files) if path.exists() else 0


def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    captured = ShardCapture(TARGET, AUX, conversations(200), 8, batch_tokens=64, tokens_per_shard=30)
    with captured.open(tmp_path / "whole") as shards:
        captured.run(shards)
    draw, folder, kept, kills = random.Random(0), tmp_path / "s", 0, 0
    attempts = in_full(5, 3)
    for number in range(attempts):
        seconds = draw.uniform(0.01, in_full(0.06, 0.2)) if number < attempts - 1 else 60
        code = Fork("tests.data_pipelines.capture_until_killed", str(folder), str(seconds)).wait(120)
        kills += code == -signal.SIGPROF
        if code == 0:
            break
        with pytest.raises(ShardError, match="not finished|not a folder of shards"):
            ShardReader(folder)
        complete = whole_shards(folder)
        assert complete >= kept
        kept = complete
    assert kills > in_full(1, 0)
    assert kept > 0
    assert content(folder) == content(tmp_path / "whole")


def other_target() -> object:
    target = tiny_target()
    norm = target.model.model.layers[2].input_layernorm
    norm.weight = norm.weight + 0.25
    return target


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"target": other_target()}, r"target: 4 layers of 32 \(\w{16}\) there, 4 layers of 32 \(\w{16}\) now"),
    ({"aux_layers": (0, 2)}, "layers: 0, 1, the last of 4 there, 0, 2, the last of 4 now"),
    ({"samples": conversations(61)}, r"conversations: 60 of 1,\d+ tokens \(\w+\) there, 61 of"),
    ({"samples": [(t, [1] * len(m)) for t, m in conversations(60)]}, r"conversations: 60 of"),
    ({"bits": 8}, "bits: 16 there, 8 now"),
    ({"batch_tokens": 65}, "order: by length in windows of 512, 64 tokens a batch, 100 a shard of whole batches there"),
    ({"tokens_per_shard": 101}, "order: .* 101 a shard of whole batches now"),
]


def test_what_differs_is_said(tmp_path: Path) -> None:
    same: dict[str, Any] = {"target": TARGET, "aux_layers": AUX, "samples": conversations(60), "batch_tokens": 64}
    others = [(ShardCapture(**{**same, "tokens_per_shard": 100, **change}), reason) for change, reason in DIFFERENT]
    interrupt(plan(), tmp_path / "s")
    for other, reason in others:
        with pytest.raises(OutputError, match=rf"something else \({reason}"):
            other.open(tmp_path / "s").__enter__()
    with plan().open(tmp_path / "s") as shards:
        plan().run(shards)
    for other, reason in others:
        with pytest.raises(OutputError, match=rf"something else \({reason}"):
            other.open(tmp_path / "s", resume=True).__enter__()


def interrupt(captured: ShardCapture, folder: Path, after: int = 2) -> None:
    """Capture some shards, then stop as Ctrl-C does."""
    with pytest.raises(KeyboardInterrupt), captured.open(folder) as shards:
        captured.run(Stopping(shards, after))


class Stopping:
    """Accepts a number of shards, then raises."""

    def __init__(self, shards: ShardWriter, after: int):
        self.shards, self.files, self.left = shards, shards.files, after

    def write(self, index: int, samples: Sequence[Example]) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.shards.write(index, samples)
        self.left -= 1


def test_an_interrupted_capture_goes_on(tmp_path: Path, whole: dict[str, bytes]) -> None:
    interrupt(plan(), tmp_path / "s", 5)
    with plan().open(tmp_path / "s") as shards:
        assert plan().missing(shards) == list(range(5, SHARDS))
        plan().run(shards)
    assert content(tmp_path / "s") == whole


def test_the_same_target_elsewhere_is_the_same(tmp_path: Path) -> None:
    interrupt(plan(), tmp_path / "s")
    target = tiny_target()
    target.name = "/another/place"
    elsewhere = ShardCapture(target, AUX, conversations(60), 16, 64, 100)
    with elsewhere.open(tmp_path / "s") as shards:
        assert len(shards.files) == 2
        elsewhere.run(shards)


def test_damaged_shards_are_captured_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "s"
    with plan().open(folder) as shards:
        plan().run(shards)
    damaged = [0, 5, 6, SHARDS - 1]
    names = [f"shard-{index:05d}.safetensors" for index in damaged]
    for name in names:
        (folder / name).write_bytes(whole[name][:-9])
        with pytest.raises(ShardError, match="is cut short.*again with `eagle-data collect`; with --resume"):
            ShardReader(folder).verify()
    with pytest.raises(OutputError, match="exists already"):
        plan().open(folder).__enter__()
    with plan().open(folder, resume=True) as shards:
        assert plan().missing(shards) == damaged
        plan().run(shards)
    assert content(folder) == whole


@pytest.mark.parametrize("bits", [16, 8])
def test_the_last_layer_alone(tmp_path: Path, bits: int) -> None:
    ShardCapture(TARGET, (), conversations(9), bits).write(tmp_path / "s")
    assert {(s.states.features.shape[1], s.states.last.shape[1]) for s in ShardReader(tmp_path / "s")} == {(0, 32)}


def test_no_conversations_make_no_shards(tmp_path: Path) -> None:
    ShardCapture(TARGET, AUX, [], 8).write(tmp_path / "s")
    assert len(ShardReader(tmp_path / "s")) == 0


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_target_without_numbers_is_refused(number: str) -> None:
    target = tiny_target()
    embedding = target.model.model.embed_tokens
    embedding.weight = embedding.weight * mx.array(float(number))
    with pytest.raises(TargetError, match="tiny gives hidden states that are NaN or infinite for a conversation of 34"):
        list(capture(target, AUX, conversations(1)))
