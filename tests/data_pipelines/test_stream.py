"""Streams yield every row once, in an order that depends only on the seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.data_pipelines import Conversation, DataConfig, ReadReport, read_conversations
from eagle_mlx.data_pipelines.sources.reading import shuffled
from eagle_mlx.errors import DataError


def parts(sizes: list[int]) -> list[Callable[[], Iterator[tuple[int, int]]]]:
    return [lambda part=part, size=size: ((part, n) for n in range(size)) for part, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 12), st.integers(0, 3))
def test_every_row_comes_once_and_again_in_the_same_order(sizes: list[int], block: int, seed: int) -> None:
    once = list(shuffled(parts(sizes), seed, block))
    assert sorted(once) == [(part, n) for part, size in enumerate(sizes) for n in range(size)]
    assert list(shuffled(parts(sizes), seed, block)) == once
    assert list(shuffled(parts(sizes), None, block)) == sorted(once)


def test_the_seed_decides_the_order() -> None:
    orders = {tuple(shuffled(parts([9, 9, 9]), seed, 5)) for seed in range(5)}
    assert len(orders) == 5


def test_no_more_than_a_block_is_held() -> None:
    read = []

    def rows() -> Iterator[int]:
        for n in range(100):
            read.append(n)
            yield n

    stream = shuffled([rows], 0, 10)
    for n in range(1, 50):
        next(stream)
        assert len(read) <= (n // 10 + 1) * 10


def read(spec: str, **options: object) -> list[Conversation]:
    return list(read_conversations(DataConfig((spec,), stream=True, **options), "all"))  # type: ignore[arg-type]


def test_files_and_folders_are_streamed(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(30)]
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "set"
    folder.mkdir()
    for part in range(3):
        table = pa.Table.from_pylist(rows[10 * part : 10 * part + 10])
        pq.write_table(table, folder / f"train-{part:05}-of-00003.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    whole = list(read_conversations(DataConfig((str(lines),), seed=None), "all"))
    assert read(str(lines), seed=None) == whole
    assert read(str(tmp_path / "x.parquet"), seed=None) == whole
    assert read(str(folder), seed=None) == whole
    for spec in (str(lines), str(folder)):
        shuffled_once = read(spec, seed=7)
        assert shuffled_once == read(spec, seed=7) != whole
        assert {c.messages for c in shuffled_once} == {c.messages for c in whole}
    assert read(str(lines), seed=None)[4].origin == f"{lines}:5"
    assert {c.origin for c in read(str(folder), seed=1)} == {
        f"{folder}:part {part}:{n}" for part in (1, 2, 3) for n in range(1, 11)
    }


def test_a_bad_line_of_a_stream_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n{"text": "c"}\n')
    with pytest.raises(DataError, match=r"x.jsonl:2: not valid JSON"):
        read(str(path), seed=None)
    report = ReadReport()
    config = DataConfig((str(path),), seed=None, stream=True, skip_bad=True)
    assert [c.text for c in read_conversations(config, "all", report=report)] == ["a", "c"]
    assert report.left_out["unusable"] == 1
    assert "x.jsonl:2: not valid JSON" in str(report)


def test_a_list_is_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"text": "a"}, {"text": "b"}]')
    assert [(c.text, c.origin) for c in read(str(path), seed=None)] == [("a", f"{path}:1"), ("b", f"{path}:2")]
