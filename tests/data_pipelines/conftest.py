"""Give every test its own cache for local files."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from tests.data_pipelines.rows import ROWS


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Path = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Write a file of six questions with their answers."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)
