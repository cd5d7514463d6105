"""The tables of metrics in docs/serving.md, read from `serve/api/metrics.py`. `python docs/results.py` writes them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "serve" / "api" / "metrics.py"


def prometheus() -> list[list[str]]:
    """Return name and meaning of each metric of `/metrics`."""
    rows = [[f"`{name}`", text] for _, name, text in sorted(_metrics())]
    assert rows, SOURCE
    return rows


def _metrics() -> Iterator[tuple[int, str, str]]:
    """Yield line, name and meaning: neighboring strings in tuples and calls."""
    for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Tuple, ast.Call)):
            continue
        parts = node.elts if isinstance(node, ast.Tuple) else node.args
        strings = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        if len(strings) >= 2 and re.fullmatch(r"(vllm|eagle):\w+", strings[0]):
            labels = f"{{{strings[2]}}}" if len(strings) > 2 else ""
            counts = labels or any("counter" in ast.unparse(part).lower() for part in parts[:1])
            yield node.lineno, f"{strings[0]}{'_total' if counts else ''}{labels}", strings[1]


def fields() -> list[list[str]]:
    """Return name and meaning of each field of `/v1/spec_decode/metrics`."""
    summary = importlib.import_module("eagle_mlx.serve.api.metrics").SpeculationSummary
    properties = summary.model_json_schema()["properties"]
    return [[f"`{name}`", field["description"].replace("\n", " ").rstrip(".")] for name, field in properties.items()]
