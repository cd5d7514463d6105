"""Write the pages of results from benchmarks/results/*.yaml, their plots, and the tables that other pages show.

    python docs/results.py

It also prints how many words are written by hand. A test compares the pages with what this script would write.
Other pages hold `<!-- table: NAME/TABLE -->`, `<!-- bars: NAME … -->` or `<!-- metrics: … -->` before a table, and
`<!-- end -->` after it. `<!-- generated: … -->` marks what another script or test writes.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
PAGES = {
    "real-model": "SmolLM2-135M-Instruct",
    "decoding": "Decoding with the included model",
    "training": "Training heads",
    "serving": "Serving the included model",
    "peers": "Other engines",
    "gpu": "An H100",
}
GENERATED = ("docs/flags.md", *(f"benchmarks/results/{name}.md" for name in PAGES))
"""Pages that scripts write."""
MOST_WORDS = 22_000
"""Words of README, CONTRIBUTING, docs/ and benchmarks/results/ that are written by hand."""
BLOCK = re.compile(r"(<!-- (table|bars|metrics|generated): ([^\n]*) -->\n\n)(.*?)(<!-- end -->)", re.DOTALL)
"""A part of a page that a script writes: its kind, its arguments, its text."""


@dataclass(frozen=True)
class Result:
    """A question and what was measured. Every cell is text, so that figures stay as they were taken."""

    page: str
    title: str
    question: str
    trained_on: str
    left_out: str
    machine: str
    date: date
    command: str
    commit: str = ""
    tables: list[dict[str, Any]] = field(default_factory=list)
    """Each with `columns` (with units) and `rows`, and maybe `caption`, `name` and `plot`."""
    bars: list[dict[str, Any]] = field(default_factory=list)
    """Each with `figure`, `result`, `bar` and `pass`: true, false, or null without a bar. Bold marks a miss."""
    reading: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")


@cache
def results() -> dict[str, Result]:
    """Return the results by name, newest first. Raises TypeError if a file has an unknown or missing key."""
    files = {file.stem: Result(**yaml.safe_load(file.read_text(encoding="utf-8"))) for file in FOLDER.glob("*.yaml")}
    return dict(sorted(files.items(), key=lambda item: (-item[1].date.toordinal(), item[0])))


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def bars(names: list[str], page: Path) -> str:
    """Return a table of what these results reached, with links from `page`."""
    rows = []
    for name in names:
        result = results()[name]
        place = os.path.relpath(FOLDER / f"{result.page}.md", page.parent)
        rows += [[row["figure"], row["result"], row["bar"], f"[how]({place}#{result.anchor})"] for row in result.bars]
    return table(["figure", "result", "bar", ""], rows)


def part(kind: str, names: str, page: Path) -> str:
    """Return the text of a block in `page`."""
    if kind == "bars":
        return bars(names.split(), page)
    if kind == "metrics":
        return table(["name", "meaning"], runpy.run_path(str(ROOT / "docs" / "metrics.py"))[names]())
    name, _, wanted = names.partition("/")
    rows = next(entry for entry in results()[name].tables if entry.get("name") == wanted)
    return table(rows["columns"], rows["rows"])


def section(name: str, result: Result) -> str:
    """Return a result as a section of its page."""
    parts = [f"## {result.title}\n\n{result.question}\n"]
    for number, entry in enumerate(result.tables):
        parts += [f"{entry['caption']}:\n"] if "caption" in entry else []
        parts += [table(entry["columns"], entry["rows"])]
        parts += [f"![{result.title}, plotted]({picture(name, number).name})\n"] if "plot" in entry else []
    if result.bars:
        parts += [
            table(["figure", "result", "bar"], [[row["figure"], row["result"], row["bar"]] for row in result.bars])
        ]
    parts += [f"{result.reading}\n"] if result.reading else []
    place = f"{result.date}{', commit ' * bool(result.commit)}{result.commit}: {result.machine}"
    parts += [f"{place}. Trained on: {result.trained_on}. Left out: {result.left_out}.\n"]
    return "\n".join([*parts, f"```\n{result.command}```\n"])


def page_of(key: str) -> str:
    """Return the text of a page of results."""
    chosen = {name: result for name, result in results().items() if result.page == key}
    index = "\n".join(f"- [{result.title}](#{result.anchor})" for result in chosen.values())
    head = f"# {PAGES[key]}\n\n`python docs/results.py` writes this page from the [data](README.md).\n\n{index}\n"
    return "\n".join([head, *(section(name, result) for name, result in chosen.items())])


def with_parts(path: Path) -> str:
    """Return the text of a page with its blocks as they should be."""

    def filled(match: re.Match[str]) -> str:
        text = match[4] if match[2] == "generated" else part(match[2], match[3], path) + "\n"
        return match[1] + text + match[5]

    return BLOCK.sub(filled, path.read_text(encoding="utf-8"))


def pages() -> dict[Path, str]:
    """Return what each page should hold."""
    texts = {FOLDER / f"{key}.md": page_of(key) for key in PAGES}
    return texts | {path: with_parts(path) for path in by_hand()}


def by_hand() -> list[Path]:
    """Return the pages that people write."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *FOLDER.glob("*.md")]
    return sorted(path for path in paths if str(path.relative_to(ROOT)) not in GENERATED)


def words(path: Path) -> int:
    """Count the words of a page that are written by hand: everything with a letter or a digit."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def picture(name: str, number: int) -> Path:
    return FOLDER / f"{name}{number or ''}.svg"


def digest(entry: dict[str, Any]) -> str:
    """Return a hash of a plotted table, which its picture holds."""
    return hashlib.sha256(repr([entry["columns"], entry["rows"], entry["plot"]]).encode()).hexdigest()[:16]


def pictures() -> dict[Path, dict[str, Any]]:
    """Return the tables that have a plot."""
    return {
        picture(name, number): entry
        for name, result in results().items()
        for number, entry in enumerate(result.tables)
        if "plot" in entry
    }


def number(cell: str, value: str = "first") -> float:
    """Return the first number of a cell, or the median of all."""
    found = [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*|\.\d+", re.sub(r",(?= )", " ", cell))]
    return median(found) if value == "median" else found[0]


def draw(path: Path, entry: dict[str, Any]) -> None:
    """Draw a table. `plot` names x and y columns, kind (line or bar), and maybe rows, value and scale."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    plot = entry["plot"]
    columns = [column.strip("`") for column in entry["columns"]]
    rows = list(islice(entry["rows"], int(plot.get("rows", 10_000))))
    labels = [row[entry["columns"].index(plot["x"])].replace("`", "") for row in rows]
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "results", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
        for name in plot["y"]:
            place = entry["columns"].index(name)
            points = [(label, row[place]) for label, row in zip(labels, rows, strict=True) if row[place]]
            heights = [number(cell, plot.get("value", "first")) for _, cell in points]
            if plot["kind"] == "bar":
                axes.barh([label for label, _ in points][::-1], heights[::-1], label=columns[place])
            else:
                axes.plot([number(label) for label, _ in points], heights, "o-", label=columns[place])
        if plot["kind"] == "bar":
            axes.set_xlabel(plot["y"][0])
        else:
            axes.set_xlabel(plot["x"])
            axes.set_xscale(plot.get("scale", "linear"))
            axes.legend()
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": digest(entry)})
        pyplot.close(figure)


def main() -> None:
    """Write the pages, draw the plots that are not up to date, and print the words of each page."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for path, entry in pictures().items():
        if not path.exists() or digest(entry) not in path.read_text(encoding="utf-8"):
            draw(path, entry)
    counts = {path: words(path) for path in by_hand()}
    for path, count in counts.items():
        print(f"{count:6,} {path.relative_to(ROOT)}")
    print(f"{sum(counts.values()):6,} words by hand, at most {MOST_WORDS:,}")


if __name__ == "__main__":
    main()
