"""What runs of eagle-train begin with: a tiny target in a folder, and chats in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle_mlx.train.report import PICTURES, Row
from eagle_mlx.train.run import loop
from tests.fakes import tiny_target_folder
from tests.full import FULL


@pytest.fixture(autouse=True)
def _few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave empty files for pictures, unless in full: drawing seven takes four times as long as a tiny run.

    A test with `usefixtures("pictures")` has them drawn.
    """
    if not FULL and "pictures" not in request.fixturenames:
        monkeypatch.setattr(loop, "write_plots", _touch)


def _touch(rows: Sequence[Row], folder: Path) -> list[Path]:
    written = [folder / name for name in PICTURES]
    for path in written:
        path.touch()
    return written


@pytest.fixture
def pictures() -> None:
    """The pictures of runs are drawn."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"prompt": f"add {i}", "completion": f"def add(x):\n    return x + {i}"} for i in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file
