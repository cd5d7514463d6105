"""Local files and the built-in source: contents, order and split."""

from __future__ import annotations

import gzip
import json
import socket
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_mlx.data_pipelines import Conversation, DataConfig, read_conversations
from eagle_mlx.data_pipelines.conversation import COUNTED, HELDOUT_ONE_IN
from eagle_mlx.data_pipelines.sources import reading, stdlib, tables
from eagle_mlx.data_pipelines.sources.stdlib import SourceFile, iter_files
from eagle_mlx.errors import ConfigError, DataError
from tests.full import in_full

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    {"prompt": "e", "completion": "f"},
    {"text": "g"},
]


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def read(spec: str, split: Any = "all", **options: Any) -> list[Conversation]:
    return list(read_conversations(DataConfig((spec,), **{"seed": None, **options}), split))


def said(conversations: list[Conversation]) -> list[str | None]:
    return [c.text or c.messages[-1].content for c in conversations]


def test_jsonl_may_mix_shapes_and_keeps_its_line_numbers(tmp_path: Path) -> None:
    spec = write(tmp_path / "x.jsonl", *map(json.dumps, ROWS))
    conversations = read(spec)
    assert said(conversations) == ["b", "d", "f", "g"]
    assert [c.origin for c in conversations] == [f"{spec}:{n}" for n in (1, 2, 3, 4)]


def test_a_json_list_and_parquet_hold_the_same(tmp_path: Path) -> None:
    listed = tmp_path / "x.json"
    listed.write_text(json.dumps(ROWS, indent=1))
    lines = write(tmp_path / "y.json", *map(json.dumps, ROWS))
    pq.write_table(pa.Table.from_pylist([{"prompt": "e", "completion": "f"}, {"text": "g"}]), tmp_path / "x.parquet")
    assert said(read(str(listed))) == said(read(lines)) == ["b", "d", "f", "g"]
    table = pa.Table.from_pylist([{"prompt": "e", "completion": "f"}, {"prompt": "h", "completion": "i"}])
    pq.write_table(table, tmp_path / "x.parquet")
    assert said(read(str(tmp_path / "x.parquet"))) == ["f", "i"]


def test_local_files_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert len(read(write(tmp_path / "x.jsonl", *map(json.dumps, ROWS)))) == 4


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    for text in ("old", "new"):
        assert said(read(write(tmp_path / "x.jsonl", json.dumps({"text": text})))) == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.jsonl is empty"),
        (b'{"text": "a"}\n\n{"text": \n', "x.jsonl:3: not valid JSON"),
        (b'{"text": "a"}\n{"text": \n', "x.jsonl:2: not valid JSON"),
        (b'{\n  "text": "a"\n}', "x.jsonl:1: not valid JSON at column 2: .*; each line must be a whole object"),
        (b'{"text": "a"}\n{"text": "b"', "x.jsonl:2: not valid JSON at column 13: Expecting"),
        (b'{"text": "a"}\n{"text": "b', "x.jsonl:2: not valid JSON at column 10: Unterminated string starting"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "x.jsonl:2: not UTF-8"),
        (b'{"text": "a"}\n{"text": "\\ud83d"}\n', "x.jsonl:2: not valid Unicode"),
        (b'{"text": "a"}\n{"text": "b", "n": 1%s}\n' % (b"0" * 5000), "x.jsonl:2: not valid JSON"),
        (b'{"text": "a"}\n{"text": %s' % (b"[" * 100_000), "x.jsonl:2: not valid JSON"),
        (b'{"text": "a"}\n[1]\n', "x.jsonl:2: a row must be an object, not list; .*skip such rows with --skip-bad"),
        (b'{"text": "a"}\n{"q": "b"}\n', r"x.jsonl:2: the row's keys \(q\) have no known shape"),
    ],
)
def test_a_bad_jsonl_row_is_named_before_anything_is_yielded(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        next(read_conversations(DataConfig((str(tmp_path / "x.jsonl"),)), "all"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", b'\n{"text": "a"}\r\n\r\n{"text": "b"}\n \n'),
        ("x.jsonl", b'[{"text": "a"},\n{"text": "b"}]\n'),
        ("x.jsonl.gz", gzip.compress(b'\xef\xbb\xbf[{"text": "a"}, {"text": "b"}]', mtime=0)),
    ],
)
def test_blank_lines_are_ignored_and_a_list_may_have_any_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert said(read(str(tmp_path / name))) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"\n\n", "x.jsonl is empty"),
        ("x.json", b"[1, 2]", "x.json:1: a row must be an object"),
        ("x.json", b"[]", "empty list"),
        ("x.json", b'[{"text": ', "x.json is not valid JSON"),
        ("x.json", b'[{"text": "a"}, {"text": "\\ud83d"}]', "x.json:2: not valid Unicode"),
        ("x.parquet", b"PAR1 no table", "x.parquet cannot be read as parquet"),
    ],
)
def test_other_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(str(tmp_path / name))


@pytest.mark.parametrize(("name", "content"), [("x.json", b'[{"text": "a"}]'), ("x.jsonl", b'{"text": "a"}\n')])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert said(read(str(tmp_path / name))) == ["a"]
    assert said(read(f"text:{tmp_path}")) == [content.decode()]


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"q": "a"}]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet:1: the row's keys \(q\)"):
        read(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.jsonl", "there is no file missing.jsonl"),
        ("builtin:perl", "the built-in sources are builtin:python"),
        ("what is this?", "is not a source of conversations; sources are"),
        ("nobody/nothing-at-all", "cannot be loaded from the hub"),
    ],
)
def test_a_source_that_there_is_not(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(spec)


def test_a_split_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="train, heldout or all"):
        read("builtin:python", split="test")


def test_the_sides_of_a_file_are_disjoint_and_make_the_whole(tmp_path: Path) -> None:
    spec = write(tmp_path / "x.jsonl", *(json.dumps({"prompt": f"{n}", "completion": f"{n}"}) for n in range(500)))
    train, held_out = (set(said(read(spec, split=split))) for split in ("train", "heldout"))
    assert not train & held_out
    assert train | held_out == {f"{n}" for n in range(500)}
    assert 50 <= len(held_out) <= 60


@pytest.mark.parametrize(("count", "least"), [(2, 1), (3, 1), (4, 2), (25, 3), (50, 5), (99, 10), (499, 50), (600, 50)])
def test_small_files_hold_out_at_least_one_conversation_in_ten_and_two(tmp_path: Path, count: int, least: int) -> None:
    for sample in range(in_full(5, 2)):
        rows = [json.dumps({"prompt": f"{sample}: {n}", "completion": f"{n}"}) for n in range(count)]
        spec = write(tmp_path / "x.jsonl", *rows)
        train, held_out = (read(spec, split=split) for split in ("train", "heldout"))
        assert least <= len(held_out) <= max(least, 12)
        assert len(train) + len(held_out) == count
        assert not {c.prompt_key() for c in train} & {c.prompt_key() for c in held_out}
        assert set(said(read(write(tmp_path / "y.jsonl", *rows[::-1]), split="heldout", seed=7))) == set(said(held_out))


def test_a_prompt_that_one_source_holds_out_is_not_trained_on_from_another(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{n}", "completion": "a"}) for n in range(40)]
    specs = [write(tmp_path / "x.jsonl", *rows), write(tmp_path / "y.jsonl", *rows[:9])]
    held_out = {c.prompt_key() for spec in specs for c in read(spec, split="heldout")}
    train = read_conversations(DataConfig(tuple(specs)), "train")
    assert held_out.isdisjoint(c.prompt_key() for c in train)


def test_a_text_of_a_few_pieces_holds_out_two(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(f"line {n} " + "x" * 100 for n in range(300)), encoding="utf-8")
    spec = f"text:{tmp_path / 'book.txt'}"
    pieces = len(read(spec, split="all"))
    assert 15 < pieces < 40
    assert len(read(spec, split="heldout")) == pieces - len(read(spec, split="train")) >= 2


def test_the_only_prompt_of_a_file_is_trained_on(tmp_path: Path) -> None:
    spec = write(tmp_path / "x.jsonl", *(json.dumps({"prompt": "a", "completion": f"{n}"}) for n in range(20)))
    assert len(read(spec, split="train")) == 20


def test_the_seed_fixes_the_order_and_the_limit_cuts_it(tmp_path: Path) -> None:
    spec = write(tmp_path / "x.jsonl", *(json.dumps({"text": f"{n}"}) for n in range(50)))
    first, second = said(read(spec, seed=1)), said(read(spec, seed=2))
    assert first == said(read(spec, seed=1)) != second
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert said(read(spec, seed=1, limit=7)) == first[:7]


def test_the_standard_library_is_held_out_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"heldout": list(islice(iter_files("heldout"), 25))}
    monkeypatch.setattr(stdlib, "iter_files", files.__getitem__)
    held_out = read("builtin:python", "heldout", seed=0)
    answers = said(held_out)
    assert len(set(answers)) == len(answers) > 200
    assert any(c.text for c in held_out)
    assert any('"""' in c.messages[0].content for c in held_out if c.messages)
    assert answers[:99] == said(read("builtin:python", "heldout", seed=0, limit=99))
    assert answers[:99] != said(read("builtin:python", "heldout", limit=99, seed=1))


def test_the_held_out_files_of_the_standard_library_are_few_and_never_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {split: list(iter_files(split)) for split in get_args(stdlib.Split)}
    assert {file.path for file in files["train"]}.isdisjoint(file.path for file in files["heldout"])
    share = len(files["heldout"]) / sum(map(len, files.values()))
    assert 0.5 < share * HELDOUT_ONE_IN < 2
    few = {split: some[:12] for split, some in files.items()}
    monkeypatch.setattr(stdlib, "iter_files", few.__getitem__)
    sides = {split: {file.path for file in some} for split, some in few.items()}
    sides["all"] = sides["train"] | sides["heldout"]
    for name in ("python", "python-chat", "python-docstrings", "python-files"):
        for split, paths in sides.items():
            read_from = {c.origin.split(":")[2] for c in read(f"builtin:{name}", split)}
            assert read_from, (name, split)
            assert read_from <= paths, (name, split)


@pytest.fixture
def _small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'def f{n}(x):\n    """Say {n}."""\n    return {n}\n\ndef g():\n    return 0\n\ndef h{n}():\n    return {n}\n'
    files = [SourceFile(f"m{n}.py", code.format(n=n)) for n in range(40)]
    monkeypatch.setattr(stdlib, "iter_files", lambda split: files if split == "train" else [])


@pytest.mark.usefixtures("_small_library")
def test_the_built_in_sources() -> None:
    answers = said(read("builtin:python-chat", seed=0))
    assert len(answers) == 81, "40 with a docstring, 40 without, and one that all files share"
    assert sorted(map(str, said(read("builtin:python-docstrings")))) == sorted(
        f"def f{n}(x):\n    return {n}" for n in range(40)
    )
    pieces = read("builtin:python-files")
    assert len(pieces) == 40
    assert all(c.text for c in pieces)
    assert len(read("builtin:python", seed=0)) == 121
    assert read("builtin:python", split="heldout") == []
    first = read("builtin:python-docstrings")[0]
    assert first.origin == "builtin:python:m0.py:f0"
    assert [m.as_dict() for m in first.messages] == [
        {"role": "user", "content": 'def f0(x):\n    """Say 0."""'},
        {"role": "assistant", "content": "def f0(x):\n    return 0"},
    ]


def test_pieces_of_a_file_are_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line_{n} = {n * n}\n" for n in range(500))
    monkeypatch.setattr(stdlib, "iter_files", lambda split: [SourceFile("m.py", text)] if split == "train" else [])
    pieces = read("builtin:python-files")
    assert "".join(str(c.text) for c in pieces) == text
    assert all(len(str(c.text)) <= tables.PIECE_CHARS for c in pieces)
    lines = [int(c.origin.rsplit(":", 1)[1]) for c in pieces]
    assert [text.splitlines()[n - 1] for n in lines] == [str(c.text).splitlines()[0] for c in pieces]


def test_a_folder_of_text_files_is_read_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "docs" / ".git").mkdir(parents=True)
    (tmp_path / "docs" / ".git" / "config").write_text("hidden")
    (tmp_path / "docs" / "empty.txt").write_text("")
    (tmp_path / "docs" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "docs" / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "docs" / "long.md").write_text("a line of a long text\n" * 200)
    (tmp_path / "z.py").write_text("x = 1\n")
    conversations = read(f"text:{tmp_path}")
    assert "".join(str(c.text) for c in conversations) == "a line of a long text\n" * 200 + "x = 1\n"
    assert max(len(str(c.text)) for c in conversations) <= 1500
    assert [c.origin for c in conversations][-2:] == [f"{tmp_path}/docs/long.md:137", f"{tmp_path}/z.py:1"]
    train, held_out = read(f"text:{tmp_path}", "train", seed=1), read(f"text:{tmp_path}", "heldout", seed=1)
    assert sorted(map(str, said(train + held_out))) == sorted(map(str, said(conversations)))
    assert said(read(f"text:{tmp_path}/z.py")) == ["x = 1\n"]
    one_line = tmp_path / "one.txt"
    one_line.write_text("word " * 1000)
    assert "".join(map(str, said(read(f"text:{one_line}")))) == "word " * 1000


def test_text_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(b"\0")
    for place, message in (
        ("empty", "empty has no files"),
        ("binary", "binary has no text files in UTF-8"),
        ("binary/a.bin", "a.bin is empty, or not text in UTF-8"),
        ("missing", "there is no file or folder"),
    ):
        with pytest.raises(DataError, match=message):
            read(f"text:{tmp_path}/{place}")

    def refused(self: Path, *args: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match=r"a\.bin cannot be read: Permission denied; make it readable"):
        read(f"text:{tmp_path}/binary")


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_row_of_a_json_file_is_parsed_once(tmp_path: Path, skip_bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are counted to hold out enough of them, too."""
    rows = [json.dumps({"prompt": f"p{n}", "completion": "a"}) for n in range(COUNTED + 40)]
    few = write(tmp_path / "few.jsonl", *rows[:9], *(["{}"] if skip_bad else []))
    listed = tmp_path / "listed.json"
    listed.write_text(f"[{', '.join(rows)}]")
    origins, parse_row = list[str](), reading.parse_row

    def noted(row: Any, origin: str, fields: Any) -> Conversation:
        origins.append(origin)
        return parse_row(row, origin, fields)

    monkeypatch.setattr(reading, "parse_row", noted)
    config = DataConfig((few, str(listed)), skip_bad=skip_bad)
    train, held_out = (len(list(read_conversations(config, split))) for split in ("train", "heldout"))
    assert train + held_out == 9 + len(rows)
    assert held_out >= 2
    assert set(Counter(origins).values()) == {2}  # once for each split
