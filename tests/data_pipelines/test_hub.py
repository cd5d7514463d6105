"""Calls of `datasets` for data sets on the hub, and handling of their results."""

from __future__ import annotations

import inspect
from typing import Any

import datasets
import pytest

from eagle_mlx.data_pipelines import Conversation, DataConfig, Message, read_conversations
from eagle_mlx.errors import DataError

ROWS = [{"question": f"{n}", "answer": f"it is {n}"} for n in range(12)]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Record the calls, and return an in-memory data set."""
    calls: list[tuple[str, dict[str, Any]]] = []

    signature = inspect.signature(datasets.load_dataset)

    def load(path: str, /, **options: Any) -> Any:
        signature.bind(path, **options)
        calls.append((path, options))
        rows = datasets.Dataset.from_list(ROWS)
        return rows.to_iterable_dataset(num_shards=3) if options["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def read(*sources: str, **options: Any) -> list[Conversation]:
    return list(read_conversations(DataConfig(sources, **options), "all"))


def test_a_set_is_named_with_config_and_split(loads: list[tuple[str, dict[str, Any]]]) -> None:
    conversations = read("you/set:main:train[:50%]", map=("prompt=question,completion=answer",), seed=None)
    assert loads == [("you/set", {"name": "main", "split": "train[:50%]", "streaming": False})]
    assert conversations[0] == Conversation((Message("user", "0"), Message("assistant", "it is 0")))
    assert conversations[4].origin == "you/set:main:train[:50%]:5"
    assert len(conversations) == 12


def test_presets_name_their_files(loads: list[tuple[str, dict[str, Any]]]) -> None:
    assert read("preset:sharegpt") == [], "none of these rows is a conversation of ShareGPT"
    [(name, options)] = loads
    assert name == "Aeala/ShareGPT_Vicuna_unfiltered"
    assert options["data_files"] == "ShareGPT_V4.3_unfiltered_cleaned_split.json"
    read("preset:gsm8k@you/copy")
    assert loads[1] == ("you/copy", {"name": None, "split": "train", "streaming": False})


def test_a_streamed_set_is_read_part_by_part_and_loses_nothing(loads: list[tuple[str, dict[str, Any]]]) -> None:
    conversations = read("preset:gsm8k", stream=True, seed=3)
    assert loads[0][1]["streaming"] is True
    assert sorted(int(c.messages[0].content) for c in conversations) == list(range(12))
    assert read("preset:gsm8k", stream=True, seed=3) == conversations != read("preset:gsm8k", stream=True, seed=4)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError("Not enough disk space. Needed: 3 TB"),
            "you/set: OSError: Not enough disk space.*; use --stream",
        ),
        (
            ConnectionError("no route"),
            r"you/set \('train'\) cannot be loaded from the hub: ConnectionError",
        ),
    ],
)
def test_what_the_library_cannot_do_is_said_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def load(path: str, /, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=reason):
        read("you/set")


def test_a_stream_that_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(shards: list[int]) -> Any:
        yield ROWS[0]
        raise ConnectionError("reset by peer")

    def load(path: str, /, **options: Any) -> Any:
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match="preset:gsm8k: the stream ended early: ConnectionError: reset by peer"):
        read("preset:gsm8k", stream=True, seed=None)
