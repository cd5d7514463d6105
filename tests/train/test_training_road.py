"""The training road of docs/structure.md: the files that turn a line of jsonl into a loss."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from eagle_mlx import data_pipelines
from eagle_mlx.data_pipelines import DataConfig, capture, read_conversations, render_all
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import Batches, InMemory, TrainData
from eagle_mlx.train.run.start import new_head
from eagle_mlx.train.step.inputs import make_plan
from eagle_mlx.train.step.step import part_arrays, part_loss, weights_of_steps
from tests.fakes import tiny_target

ROOT = Path(data_pipelines.__file__).parents[1]
TARGET = tiny_target(vocab=4096, tokenizer=True)
COMPUTES = (
    "heads/",
    "formats/",
    "blas.py",
    "cpu.py",
    "kinds/",
    "unroll",
    "target.py",
    "hooks.py",
    "attention.py",
    "memory.py",
    "progress.py",
)
"""The parts of target and head, which know nothing of lines of data."""
MOST_FILES, MOST_FORMS = 15, 6


def passed(row: dict[str, Any], folder: Path) -> set[str]:
    """Return the project's files whose functions are called to turn one row of a file into a loss."""
    file, layers = folder / "chats.jsonl", (0, 1, 3)
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    config = TrainConfig.of(target="tiny", data=(str(file),), rows=1, length=64, unroll=2, aux_layers=layers)
    reading = DataConfig(config.data.sources, config.data.map)
    assert TARGET.tokenizer is not None
    head = new_head(TARGET, TrainData(InMemory([]), layers, None, {}), config, begin=False)
    head.attach(TARGET)
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT)
            if name.parts[0] not in (".venv", "tests"):
                files.add(name.as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        rendered, _ = render_all(TARGET.tokenizer, read_conversations(reading), 64)
        examples = InMemory(list(capture(TARGET, layers, rendered)))
        [rows] = Batches(examples, rows=1, length=64, seed=0).epoch(0)
        plan = make_plan(rows, 2)
        loss, *_ = part_loss(head, TARGET, part_arrays(head, TARGET, rows, plan, weights_of_steps(config)))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert loss.item() > 0
    return {name for name in files if not any(part in name for part in COMPUTES)}


def test_a_line_of_jsonl_passes_few_files(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    section = text.split("\n## The training road\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    told = {name for row in rows[2:] for name in re.findall(r"`([\w/]+\.py)`", row[2])}
    assert passed({"prompt": "What is 2 + 2?", "completion": "It is 4, I think."}, tmp_path) == told
    assert len(told) <= MOST_FILES
    assert len({row[0] for row in rows[2:]} - {"a loss"}) <= MOST_FORMS
