"""Questions with several turns and categories in eagle-bench, and text before them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.bench.cli import main
from eagle_mlx.serve.bench.measure import measure
from eagle_mlx.serve.bench.modes import BenchModels, build_modes
from eagle_mlx.serve.bench.options import BenchConfig
from eagle_mlx.serve.prompts import Question, read_questions, with_filler
from eagle_mlx.target import Target
from eagle_mlx.text import is_loop
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.full import in_full, in_turn
from tests.serve.questions import ROWS, write


@dataclass(frozen=True)
class Asked(Question):
    """A question that records the answers before its later turn."""

    noted: list[tuple[str, list[int]]] = field(default_factory=list)

    def encode(self, target: Target, answers: Sequence[str] = (), max_tokens: int = 0) -> list[int]:
        prompt = (
            super().encode(target, answers, max_tokens) if isinstance(self.content[0], dict) else self.tokens(answers)
        )
        if answers and answers[0]:
            self.noted.append((answers[0], prompt))
        return prompt

    def tokens(self, answers: Sequence[str]) -> list[int]:
        return [3, 4, 5] if answers else list(self.content)  # type: ignore[arg-type]


def test_later_turns_include_the_answers_of_their_own_mode() -> None:
    target = tiny_target(tokenizer=True)
    first, params = {"role": "user", "content": "A poem."}, SamplingParams(max_tokens=8)
    answer = Engine(target).generate([[first]], params)[0].text
    messages = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "A limerick."}]
    assert target.tokenizer is not None
    wanted = target.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    question = Asked([first], ("A limerick.",), "writing")
    modes = build_modes(BenchModels(target, tiny_head(target, draft_vocab=64)), ["plain", "ngram", "eagle"], [1], [2])
    runs = measure(target, modes, [question], BenchConfig(8, repeats=1, least_distinct=0.0), progress=False)
    assert question.noted == [(answer, wanted)] * 4, "three modes and the reference"
    for run in runs:
        assert (run.identical, run.identical_count, run.prompts) == (True, 2, 2)
        [category] = run.by_category
        assert (category.name, category.prompts, category.left_out_looping) == ("writing", 2, 0)
        assert (category.acceptance_length, category.tokens_per_second) == (
            run.acceptance_length,
            run.tokens_per_second,
        )


def test_turns_after_a_loop_are_skipped() -> None:
    target, most = tiny_target(seed=3, tokenizer=True), in_full(40, 24)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [100], [11, 12, 11, 12, 11, 12]]
    texts = Engine(target).generate(prompts, SamplingParams(max_tokens=most))
    looping = [is_loop(output.tokens, 0.6) for output in texts]
    assert 0 < sum(looping) < 4, "choose another seed"
    questions = [
        Asked(prompt, ("more",), "looping" if loops else "sound")
        for prompt, loops in zip(prompts, looping, strict=True)
    ]
    modes = build_modes(BenchModels(target), ["plain"], [1], [2])
    [run] = measure(target, modes, questions, BenchConfig(most, repeats=1, least_distinct=0.6), progress=False)
    assert [not question.noted for question in questions] == looping
    by_name = {category.name: category for category in run.by_category}
    lost = by_name["looping"]
    assert (lost.prompts, lost.left_out_looping) == (0, sum(looping))
    assert (lost.tokens_per_second, lost.acceptance_length) == (None, None)
    assert run.left_out_looping == sum(category.left_out_looping for category in run.by_category)
    assert run.prompts == sum(category.prompts for category in run.by_category)


@pytest.mark.usefixtures("little_library")
@pytest.mark.parametrize("batch", in_turn(["1", "2"], 1))
def test_the_command_reports_by_category(tmp_path: Path, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = tiny_target_folder(tmp_path / "target"), tmp_path / "head"
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), head, target_name="tiny")
    figures, file = tmp_path / "figures.json", write(tmp_path / "questions.jsonl", *ROWS)
    what = f"--target {target} --head {head} --prompts {file} --batch {batch} --limit 5 --filler 20 --json {figures}"
    flags = "--modes mlx-lm plain eagle --max-tokens 6 --repeats 1 --least-distinct 0 --quiet --depth 2 --turn 3"
    assert main([*what.split(), *flags.split()]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.split("category ")[1].splitlines()]
    varies = batch != "1"  # mlx-lm decodes one row; columns that do not vary are left out
    for category, mode, rows, turns in (("writing", "eagle", batch, "4"), ("qa", "mlx-lm", "1", "2")):
        row = [category, mode, *([rows] if varies else []), turns, "0"]
        assert row in [line[: len(row)] for line in lines]
    written = json.loads(figures.read_text())
    assert written["filler"] == 20
    assert {run["mode"] for run in written["runs"]} == {"mlx-lm", "plain", "eagle"}
    for run in written["runs"]:
        assert [(part["name"], part["prompts"]) for part in run["by_category"]] == [
            ("writing", 4),
            ("math", 1),
            ("qa", 2),
        ]
        assert run["identical"] in (True, None)
        assert all(part["tokens_per_second"] > 0 and part["acceptance_length"] >= 1 for part in run["by_category"])


@pytest.fixture
def little_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard library of a few files, which is quick to read."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(4):
        words = " ".join(f"word {number * 1000 + at}" for at in range(300))
        (folder / f"m{number}.py").write_text(f'"""{words}"""\n\ndef f():\n    """{words[::-1]}"""\n')
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(folder)})


@pytest.mark.usefixtures("little_library")
def test_each_question_has_its_own_filler(tmp_path: Path) -> None:
    target = tiny_target(tokenizer=True)
    target.context_length = 4096
    questions = read_questions(write(tmp_path / "questions.jsonl", *ROWS))
    filled = with_filler(questions, target, 300)
    assert [question.later for question in filled] == [question.later for question in questions]
    texts = []
    for before, after in zip(questions, filled, strict=True):
        wanted, got = (question.content[0]["content"] for question in (before, after))  # type: ignore[index, call-overload]
        assert got.endswith(f"\n\n{wanted}")
        texts.append(got.removesuffix(wanted))
        assert 295 <= len(after.encode(target)) - len(before.encode(target)) <= 310
    assert len(set(texts)) == len(texts)
    [raw] = with_filler([Question("x = ")], target, 20)
    assert str(raw.content).endswith("\n\nx = ")
    with pytest.raises(ConfigError, match="the standard library has too little text"):
        with_filler(questions, target, 100_000)
