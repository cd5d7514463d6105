"""The decoding road of docs/structure.md: the files that a default round uses from `generate()` to text."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import eagle_mlx as em
from eagle_mlx.plan import RoundResult
from tests.fakes import tiny_head, tiny_target

LIBRARY = Path(em.__file__).parent
COMPUTES = ("heads/", "cache/", "cpu.py", "target.py", "hooks.py", "attention.py", "memory.py", "progress.py")
"""The parts of target, head and caches, which know nothing of requests."""
MOST_FILES = 14


def passed() -> set[str]:
    """Return the library's files whose functions a warm engine calls to draft, verify and return a text."""
    target = tiny_target(tokenizer=True)
    engine = em.Engine(target, em.HeadProposer(tiny_head(target)))
    row = engine.prepare("Say something.", em.SamplingParams(max_tokens=400, ignore_eos=True))
    results: list[RoundResult] = []
    engine.observer = results.append
    engine.submit(row)
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY):
            files.add(path.relative_to(LIBRARY).as_posix())

    while not row.finish_reason:
        before = len(results)
        files.clear()
        sys.setprofile(note)
        try:
            engine.step()
            text = row.output(target.tokenizer).text
        finally:
            sys.setprofile(None)
        if before > 2 and results[-1].plan.depth:
            assert text
            return {name for name in files if not name.startswith(COMPUTES)}
    raise AssertionError("no round drafted")


def test_a_default_round_passes_few_files() -> None:
    text = (LIBRARY.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    section = text.split("\n## The decoding road\n")[1].split("\n## ")[0]
    files = passed()
    assert files == set(re.findall(r"`([\w/]+\.py)`", section)) - {"tests/eagle_mlx/test_decoding_road.py"}
    assert len(files) <= MOST_FILES
