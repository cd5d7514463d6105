"""Files of conversations appear complete or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import Conversation, DataConfig, Message, read_conversations
from eagle_mlx.data_pipelines.jsonl import as_line, open_partial, partial_path
from eagle_mlx.data_pipelines.synthesis.tries import MakeReport
from eagle_mlx.errors import OutputError

CHATS = [Conversation((Message("user", "a\nü"), Message("assistant", "b"))), Conversation(text="c")]


def write(path: Path, overwrite: bool = False) -> int:
    with open_partial(path, {}, overwrite) as part:
        for index, chat in enumerate(CHATS):
            part.add(index, 0, {}, as_line(chat))
        return part.finish(len(CHATS))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.jsonl"
    assert write(path) == 2
    assert list(read_conversations(DataConfig((str(path),), seed=None), "all")) == CHATS
    assert list(path.parent.iterdir()) == [path]


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write(path)
    assert path.read_text() == "mine"
    write(path, overwrite=True)
    assert len(path.read_text().splitlines()) == 2
    with pytest.raises(OutputError, match="is a folder"):
        write(tmp_path)


def test_a_file_that_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with open_partial(path, {}) as part:
        path.write_text("theirs")
        with pytest.raises(OutputError, match="exists already"):
            part.finish(0)
    assert path.read_text() == "theirs"


def test_a_full_disk_leaves_only_the_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "x.jsonl"
    monkeypatch.setattr(os, "fsync", full)
    kept = rf"{path} could not be written: No space left on device; finished rows are kept in {path}\.partial"
    with pytest.raises(OutputError, match=kept):
        write(path)
    assert list(tmp_path.iterdir()) == [partial_path(path)]
    monkeypatch.undo()
    assert write(path) == 2


def test_a_partial_file_has_a_rows_counts_by_name(tmp_path: Path) -> None:
    report = MakeReport(tries=1, tokens=9, markup=1)
    with open_partial(tmp_path / "a.jsonl", {}) as part:
        part.add(0, 7, report.counts(), b"")
    _, line = part.path.read_bytes().splitlines()
    assert json.loads(line.partition(b"\t")[0])[3] == {"tries": 1, "tokens": 9, "markup": 1}
    with open_partial(tmp_path / "a.jsonl", {}) as part:
        assert MakeReport(**part.done[0].counts) == report
