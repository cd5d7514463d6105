"""The measurements for a GPU run where there is none, on a small shape."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    file = tmp_path / "gpu.json"
    few = "--shape tiny --positions 3 --contexts 16 --rows 1 --depths 2 --nodes 4 --repeats 2"
    runpy.run_path(str(SCRIPT))["main"]([*few.split(), "--json", str(file)])
    found = json.loads(file.read_text())
    assert list(found["steps"][0]["verify_ms"]) == ["1", "2"]
    assert [(one["depth"], one["nodes"]) for one in found["rounds"]] == [(0, 0), (2, 0), (3, 4)] * 3
    assert all(one["ms"] > 0 for one in found["rounds"])
