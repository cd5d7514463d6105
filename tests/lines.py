"""Records which test runs which line of the project, for `tests/mutants.py`: `pytest -p tests.lines`.

Each process writes `out/lines/NAME.coverage` at its end. Data stay in memory until then, since some tests give up the
right to write files.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "out/lines"

_coverage = Coverage(
    data_file=None, source=[str(ROOT / name) for name in ("eagle_mlx", "train", "serve", "data_pipelines")]
)
_coverage.set_option("run:relative_files", True)


def pytest_sessionstart() -> None:
    _coverage.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _coverage.switch_context(item.nodeid)
    result = yield
    _coverage.switch_context("")
    return result


def pytest_sessionfinish() -> None:
    _coverage.stop()
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.coverage"
    file.unlink(missing_ok=True)
    CoverageData(str(file)).update(_coverage.get_data())
