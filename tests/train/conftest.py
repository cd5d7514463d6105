"""What runs of eagle-train begin with: a tiny target in a folder, and chats in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import tiny_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"prompt": f"add {i}", "completion": f"def add(x):\n    return x + {i}"} for i in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file
