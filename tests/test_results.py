"""Results are data: complete, shown as they are, and the documentation stays short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs" / "results.py"))
RESULTS = SCRIPT["results"]()
PAGES = SCRIPT["pages"]()


@pytest.mark.parametrize("path", sorted(PAGES), ids=lambda path: path.name)
def test_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "type: python docs/results.py"


def test_plots_are_up_to_date() -> None:
    pictures = SCRIPT["pictures"]()
    assert sorted((ROOT / "benchmarks" / "results").glob("*.svg")) == sorted(pictures)
    for path, entry in pictures.items():
        assert SCRIPT["digest"](entry) in path.read_text(encoding="utf-8"), "type: python docs/results.py"


@pytest.mark.parametrize("result", RESULTS.values(), ids=list(RESULTS))
def test_a_result_says_where_it_comes_from(result: object) -> None:
    data = vars(result)
    assert data["page"] in SCRIPT["PAGES"]
    assert all(str(data[key]).strip() for key in ("title", "question", "trained_on", "left_out", "machine", "command"))
    assert data["tables"] or data["bars"]
    for table in data["tables"]:
        assert table.keys() <= {"name", "caption", "columns", "rows", "plot"}
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    for bar in data["bars"]:
        assert bar.keys() == {"figure", "result", "bar", "pass"}
        assert (bar["pass"] is None) == (bar["bar"] == "")
        assert ("**" in bar["result"]) == (bar["pass"] is False), "bold marks a miss"


def test_titles_differ_within_a_page() -> None:
    places = [(result.page, result.anchor) for result in RESULTS.values()]
    assert len(places) == len(set(places))


def test_few_words_are_written_by_hand() -> None:
    assert sum(map(SCRIPT["words"], SCRIPT["by_hand"]())) <= SCRIPT["MOST_WORDS"]
