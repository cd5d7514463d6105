"""Inputs for runs of eagle-train: a tiny target in a folder, and chats in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.train.run import loop
from tests.fakes import tiny_target_folder
from tests.full import FULL
from tests.train.empty_pictures import leave_empty_pictures


@pytest.fixture(autouse=True)
def _few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pictures by empty files, unless in full: drawing seven takes four times as long as a tiny run.

    A test with `usefixtures("pictures")` draws them.
    """
    if not FULL and "pictures" not in request.fixturenames:
        monkeypatch.setattr(loop, "write_plots", leave_empty_pictures)


@pytest.fixture
def pictures() -> None:
    """Draw the pictures of runs."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"prompt": f"add {i}", "completion": f"def add(x):\n    return x + {i}"} for i in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file
