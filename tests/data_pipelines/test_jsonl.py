"""Files of conversations appear complete or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import Conversation, DataConfig, Message, read_conversations
from eagle_mlx.data_pipelines.jsonl import as_line, open_partial, write_lines
from eagle_mlx.data_pipelines.synthesis.tries import MakeReport
from eagle_mlx.errors import DataError, OutputError

CHATS = [Conversation((Message("user", "a\nü"), Message("assistant", "b"))), Conversation(text="c")]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.jsonl"
    assert write_lines(path, map(as_line, CHATS)) == 2
    assert list(read_conversations(DataConfig((str(path),), seed=None), "all")) == CHATS
    assert list(path.parent.iterdir()) == [path]


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write_lines(path, map(as_line, CHATS))
    assert path.read_text() == "mine"
    write_lines(path, map(as_line, CHATS), overwrite=True)
    assert len(path.read_text().splitlines()) == 2
    with pytest.raises(OutputError, match="is a folder"):
        write_lines(tmp_path, map(as_line, CHATS))


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Iterator[Conversation]:
        yield CHATS[0]
        raise DataError("bad row")

    with pytest.raises(DataError, match="bad row"):
        write_lines(tmp_path / "x.jsonl", map(as_line, failing()))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"x.jsonl could not be written: No space left on device"):
        write_lines(tmp_path / "x.jsonl", map(as_line, CHATS))
    assert list(tmp_path.iterdir()) == []


def test_a_partial_file_has_a_rows_counts_by_name(tmp_path: Path) -> None:
    report = MakeReport(tries=1, tokens=9, markup=1)
    with open_partial(tmp_path / "a.jsonl", {}) as part:
        part.add(0, 7, report.counts(), b"")
    _, line = part.path.read_bytes().splitlines()
    assert json.loads(line.partition(b"\t")[0])[3] == {"tries": 1, "tokens": 9, "markup": 1}
    with open_partial(tmp_path / "a.jsonl", {}) as part:
        assert MakeReport(**part.done[0].counts) == report
