"""Regenerated files have the same bytes after any interruption."""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.data_pipelines import Conversation, Message, cli
from eagle_mlx.data_pipelines.jsonl import PartialFile, open_partial, partial_path
from eagle_mlx.data_pipelines.synthesis.regeneration import RegenerateConfig, regenerate_to_file
from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError, OutputError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.forks import Fork
from tests.full import in_full

ROWS = 18
CONFIG = RegenerateConfig(
    SamplingParams(temperature=1.0, top_k=50, seed=5, max_tokens=10), ("Be brief.", ""), least_distinct=0.1
)


def asked(count: int = ROWS) -> list[Conversation]:
    turns = [
        (Message("user", f"question {n}"), Message("assistant", "old"), Message("user", "so?")) for n in range(count)
    ]
    chats = [Conversation(messages[: 1 + 2 * (n % 2)], origin=f"x:{n + 1}") for n, messages in enumerate(turns)]
    return [
        *chats[:-2],
        Conversation(text="import os", origin="t"),
        Conversation((Message("system", "s"),), origin="s"),
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tokenizer=True)


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the file of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "a.jsonl"
    regenerate_to_file(Engine(target, max_batch=3), asked(), CONFIG, path)
    return path.read_bytes()


def engines(target: Target) -> list[Engine]:
    head = HeadProposer(tiny_head(target))
    return [
        Engine(target, max_batch=1),
        Engine(target, max_batch=5),
        Engine(target, head, policy=FixedPolicy(3), max_batch=4),
    ]


class Stop(Exception):
    """An exception that nothing handles."""


def stop_after(rows: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call a function when this many more rows have been added."""
    add, count = PartialFile.add, 0

    def counted(self: PartialFile, *args: Any) -> None:
        nonlocal count
        add(self, *args)
        count += 1
        if count == rows:
            action()

    monkeypatch.setattr(PartialFile, "add", counted)


def fail() -> None:
    raise Stop


def test_the_file_is_the_same_in_any_company(target: Target, whole: bytes, tmp_path: Path) -> None:
    assert len(whole.splitlines()) == ROWS - 1, "the system prompt alone is dropped"
    for number, engine in enumerate(engines(target)):
        path = tmp_path / f"{number}.jsonl"
        count, report = regenerate_to_file(engine, asked(), CONFIG, path)
        assert path.read_bytes() == whole
        assert (count, report.dropped) == (ROWS - 1, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_interrupted_file_is_gone_on_with(
    target: Target, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    reports = []
    for number in range(in_full(6, 2)):
        path = tmp_path / f"{number}.jsonl"
        made = 0
        while not path.exists():  # interrupted repeatedly, each time with another engine
            engine = engines(target)[rng.randrange(3)]
            rows = rng.randint(1, ROWS)
            with monkeypatch.context() as patch:
                stop_after(rows, patch, fail)
                try:
                    reports.append(regenerate_to_file(engine, asked(), CONFIG, path))
                except Stop:
                    assert not path.exists()
                    made += rows
                    assert len(partial_path(path).read_bytes().splitlines()) == 1 + made, "every row once"
        assert path.read_bytes() == whole
        assert not partial_path(path).exists()
    assert len(set(map(str, reports))) == 1, "the counts are those of all rows"


def test_what_was_torn_or_damaged_is_made_again(
    target: Target, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    part = partial_path(path)
    with monkeypatch.context() as patch:
        stop_after(9, patch, fail)
        with pytest.raises(Stop):
            regenerate_to_file(Engine(target), asked(), CONFIG, path)
    made = part.read_bytes()
    lines = made.splitlines(keepends=True)
    damaged = [
        made[:-7],  # truncated in the last row
        made + b"[12, 3",  # truncated in the next row's head
        made[: len(lines[0]) // 2],  # truncated in the settings
        b"",
        made + bytes(64),  # blocks that were never written
        b"".join([lines[0], lines[1].replace(b"role", b"r0le", 1), *lines[2:]]),  # one changed byte
        b"".join([*lines[:2], lines[1], *lines[2:]]),  # a repeated row
    ]
    assert b"r0le" in damaged[-2]
    for content in damaged:
        part.write_bytes(content)
        regenerate_to_file(Engine(target, max_batch=in_full(2, 6)), asked(), CONFIG, path)
        assert path.read_bytes() == whole
        path.unlink()


def test_other_settings_other_data_and_another_target_are_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        stop_after(4, patch, fail)
        with pytest.raises(Stop):
            regenerate_to_file(Engine(target), asked(), CONFIG, path, {"data": ["x"]})

    def again(target: Target, count: int, config: RegenerateConfig, settings: dict[str, Any]) -> None:
        regenerate_to_file(Engine(target), asked(count), config, path, settings)

    warmer = RegenerateConfig(SamplingParams(temperature=2.0, top_k=50, seed=5, max_tokens=10), CONFIG.systems, 0.1)
    with pytest.raises(
        OutputError, match=r"a.jsonl.partial was started with temperature 1.0, not 2.0; continue with th"
    ):
        again(target, ROWS, warmer, {"data": ["x"]})
    with pytest.raises(OutputError, match="was started with data"):
        again(target, ROWS, CONFIG, {"data": ["y"]})
    with pytest.raises(OutputError, match="was started with target"):
        again(tiny_target(seed=1, tokenizer=True), ROWS, CONFIG, {"data": ["x"]})
    changed = [Conversation((Message("user", "other"),), origin="x:1"), *asked()[1:]]
    with pytest.raises(DataError, match=r"x:1 is not the conversation that was there when .* the data has changed"):
        regenerate_to_file(Engine(target), changed, CONFIG, path, {"data": ["x"]})
    with pytest.raises(DataError, match=r"holds row \d+, but the data now has only 1 conversations"):
        regenerate_to_file(Engine(target), asked()[:1], CONFIG, path, {"data": ["x"]})
    assert not path.exists()
    partial_path(path).write_bytes(b'{"text": "mine"}\n')
    with pytest.raises(OutputError, match="was not started by this version"):
        again(target, ROWS, CONFIG, {"data": ["x"]})
    assert partial_path(path).read_bytes() == b'{"text": "mine"}\n'


def test_two_processes_do_not_write_one_file(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_partial(path, {}), pytest.raises(OutputError, match="another process is writing to"):
        regenerate_to_file(Engine(target), asked(1), CONFIG, path)


@pytest.mark.parametrize("command", [["make", "--rows", "1"], ["regenerate", "--data", "builtin:python"]])
def test_an_output_in_use_is_refused_before_the_target_is_loaded(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    with open_partial(path, {}):
        assert cli.main([*command, "--target", str(tmp_path / "missing"), "--output", str(path)]) == 2
    assert "another process is writing to" in capsys.readouterr().err


def test_an_output_that_exists_is_kept(target: Target, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        regenerate_to_file(Engine(target), asked(), CONFIG, path)
    assert path.read_text() == "mine"
    regenerate_to_file(Engine(target), asked(), CONFIG, path, overwrite=True)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_keeps_what_is_done(
    target: Target, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, limits = tmp_path / "a.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (partial_path(path).stat().st_size + 5, limits[1]))

    with monkeypatch.context() as patch:
        stop_after(4, patch, fill)
        try:
            with pytest.raises(OutputError, match=r"jsonl could not be written: File too large.* same command"):
                regenerate_to_file(Engine(target), asked(), CONFIG, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(partial_path(path).read_bytes().splitlines()) >= 5
    regenerate_to_file(Engine(target), asked(), CONFIG, path)
    assert path.read_bytes() == whole


KILLED = """
import os, signal, sys
from eagle_mlx.data_pipelines import cli
from eagle_mlx.data_pipelines.jsonl import PartialFile

signal_name, rows = sys.argv.pop(1), int(sys.argv.pop(1))
add, count = PartialFile.add, 0

def counted(self, index, key, counts, row):
    global count
    count += 1
    if count == rows and signal_name == "KILL":
        self._file.write(b"[7, 12")  # and dies while it writes
        self._file.flush()
    if count == rows:
        os.kill(os.getpid(), getattr(signal, f"SIG{signal_name}"))
    add(self, index, key, counts, row)

PartialFile.add = counted
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_killed_process_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, head = str(tiny_target_folder(tmp_path / "tiny")), str(tmp_path / "head")
    save_eagle3(tiny_head(tiny_target(tokenizer=True)), head)
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(9)))
    argv = ["regenerate", "--target", model, "--data", str(data), "--temperature", "1", "--max-tokens", "6"]
    argv += ["--system", "Be brief.", "--system", ""]
    out, straight = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for signal_name, rows, code in (("KILL", "5", -signal.SIGKILL), ("TERM", "3", 143)):
        ended = Fork("-c", KILLED, signal_name, rows, *argv, "--output", str(out), "--batch", "3")
        _, errors = ended.communicate(120)
        assert ended.returncode == code, errors
        assert not out.exists()
        assert partial_path(out).exists()
    assert f"finished rows are in {partial_path(out)}, and the same command continues with it" in errors
    assert len(partial_path(out).read_bytes().splitlines()) >= 1 + 4 + 2
    assert cli.main(["inspect", str(partial_path(out))]) == 2, "it is not taken for data"
    assert cli.main([*argv, "--output", str(out), "--head", head, "--batch", "2"]) == 0
    assert "9 conversations with 9 answers of" in capsys.readouterr().out
    assert cli.main([*argv, "--output", str(straight)]) == 0
    assert out.read_bytes() == straight.read_bytes()
    assert cli.main([*argv, "--output", str(tmp_path / "c.jsonl"), "--seed", "1"]) == 0
    assert (tmp_path / "c.jsonl").read_bytes() != out.read_bytes()
    assert not list(tmp_path.glob("*.partial"))
