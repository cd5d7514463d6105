"""The comparison of kinds on a tiny target: all train on the same tokens, and all figures are written."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.fakes import tiny_target_folder
from tests.full import in_full

SCRIPT = Path(__file__).parents[2] / "checkpoints" / "scripts" / "compare_kinds.py"


def compare(patch: pytest.MonkeyPatch, target: Path, output: Path, *more: str) -> int:
    sizes = ("--conversations", "8", "--limit", "2", "--max-tokens", "6", "--depths", "1", "2")
    patch.setattr(sys, "argv", [str(SCRIPT), "--target", str(target), "--output", str(output), *sizes, *more])
    status: int = runpy.run_path(str(SCRIPT))["main"]()
    return status


def test_kinds_are_trained_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = tiny_target_folder(tmp_path / "target"), tmp_path / "out"
    titles = in_full(
        {
            "eagle3": "EAGLE-3",
            "eagle": "EAGLE-1",
            "mtp": "MTP",
            "dspark": "DSpark",
            "dflash": "DFlash",
            "peagle": "P-EAGLE",
        },
        {"dspark": "DSpark"},
    )
    assert compare(monkeypatch, target, out, "--minutes", "0", "--tokens", "500", "--kinds", *titles) == 0
    rows = json.loads((out / "comparison.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == list(titles)
    assert len({(row["tokens"], row["steps"]) for row in rows}) == 1
    assert all(1.0 <= row["by_depth"][depth]["acceptance_length"] <= 3.0 for row in rows for depth in ("1", "2"))
    assert all(row["speedup"] > 0 and row["best_depth"] in (1, 2) for row in rows)
    table = (out / "comparison.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2 : 2 + len(rows)]] == list(titles.values())
    assert all((out / f"{kind}-tokens" / "last" / "model.safetensors").is_file() for kind in titles)
    assert compare(monkeypatch, target, out) == 2
    assert "exists already" in capsys.readouterr().err
