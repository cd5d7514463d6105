"""Spec-Bench's and MT-bench's questions: read, spread over their categories, asked turn by turn, told by category."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.bench.cli import main
from eagle_mlx.serve.bench.measure import BenchConfig, measure
from eagle_mlx.serve.bench.modes import MODE_NAMES, Models, build_modes
from eagle_mlx.serve.prompts import Dialogue, Prompt, Question, behind_filler, read_questions
from eagle_mlx.text import is_loop
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.full import in_full

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again, shorter."]},
    {"question_id": 82, "category": "writing", "turns": ["A poem.", "A limerick."]},
    {"question_id": 83, "category": "writing", "turns": ["A letter.", "A note."]},
    {"question_id": 111, "category": "math", "turns": ["What is 2 + 2?"], "reference": ["4"]},
    {"question_id": 161, "category": "qa", "turns": ["Who?"]},
    {"question_id": 162, "category": "qa", "turns": ["Where?\u2028And when?"]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


def test_rows_are_read(file: Path) -> None:
    questions = read_questions(file)
    assert [question.category for question in questions] == [row["category"] for row in ROWS]
    assert questions[0].prompt.content == ({"role": "user", "content": "Write."},)
    assert questions[0].later == ("Again, shorter.",)
    assert [question.prompt.origin for question in questions] == [f"{file}:{number}" for number in range(1, 7)]


@pytest.mark.parametrize(
    ("limit", "ids"), [(1, [81]), (3, [81, 111, 161]), (4, [81, 82, 111, 161]), (5, [81, 82, 111, 161, 162])]
)
def test_fewer_are_of_all_categories(file: Path, limit: int, ids: list[int]) -> None:
    wanted = [(row["turns"][0], row["category"]) for row in ROWS if row["question_id"] in ids]  # type: ignore[index]
    taken = [(question.prompt.content[0]["content"], question.category) for question in read_questions(file, limit)]  # type: ignore[index]
    assert taken == wanted


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"prompt": "x"}', "needs `turns`"),
        ('{"category": "qa", "turns": "x"}', "a list of one text or more"),
        ('{"category": "qa", "turns": []}', "a list of one text or more"),
        ('{"category": "qa", "turns": ["x", ""]}', "turn 2 must be a text that is not empty"),
        ('{"category": "qa", "turns": [3]}', "turn 1 must be a text"),
        ('{"turns": ["x"]}', "`category` must be a text"),
        ('{"category": 7, "turns": ["x"]}', "`category` must be a text"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(f"{json.dumps(ROWS[0])}\n{row}\n")
    with pytest.raises(PromptError, match=said) as error:
        read_questions(file)
    assert str(error.value).startswith(f"{file}:2: ")


def test_a_question_that_may_not_fit_is_refused_before_it_is_asked(file: Path) -> None:
    target = tiny_target(tokenizer=True)
    question = read_questions(file)[0]
    question.check(target, 100)
    with pytest.raises(PromptError, match=r"questions\.jsonl:1: .* do not fit the target's context of 512"):
        question.check(target, 250)


def test_every_mode_is_asked_behind_its_own_answers(file: Path) -> None:
    target = tiny_target(tokenizer=True)
    question, params = read_questions(file)[1], SamplingParams(max_tokens=8)
    engine, messages = Engine(target), [{"role": "user", "content": "A poem."}]
    answer = engine.generate([messages], params)[0].text
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "A limerick."}]
    assert target.tokenizer is not None
    wanted = target.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    asked: list[tuple[str, list[int]]] = []

    def later(_: object, answers: object) -> list[int]:
        prompt = question.encode(target, answers, 8)  # type: ignore[arg-type]
        asked.append((answers[0], prompt))  # type: ignore[index]
        return prompt

    modes = build_modes(Models(target, tiny_head(target, draft_vocab=64)), ["plain", "ngram", "eagle"], [1], [2])
    dialogue = Dialogue(question.encode(target, (), 8), 2, later, "writing")
    runs = measure(target, modes, [dialogue], BenchConfig(8, repeats=1, least_distinct=0.0), progress=False)
    assert asked == [(answer, wanted)] * 4, "three modes and the reference"
    for run in runs:
        assert (run.identical, run.identical_count, run.prompts) == (True, 2, 2)
        [category] = run.by_category
        assert (category.name, category.prompts, category.left_out_looping) == ("writing", 2, 0)
        assert (category.acceptance_length, category.tokens_per_second) == (
            run.acceptance_length,
            run.tokens_per_second,
        )


def test_what_comes_behind_a_loop_is_not_asked() -> None:
    target = tiny_target(seed=3, tokenizer=True)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [100], [11, 12, 11, 12, 11, 12]]
    texts = [Engine(target).generate([prompt], SamplingParams(max_tokens=40))[0].tokens for prompt in prompts]
    looping = [is_loop(tokens, 0.6) for tokens in texts]
    assert 0 < sum(looping) < 4, "choose another seed"
    asked: list[int] = []

    def dialogue(number: int) -> Dialogue:
        def later(_: object, answers: object) -> list[int]:
            asked.append(number)
            return [3, 4, number]

        return Dialogue(prompts[number], 2, later, "looping" if looping[number] else "sound")

    modes = build_modes(Models(target), ["plain"], [1], [2])
    dialogues = [dialogue(number) for number in range(4)]
    [run] = measure(target, modes, dialogues, BenchConfig(40, repeats=1, least_distinct=0.6), progress=False)
    assert set(asked) == {number for number in range(4) if not looping[number]}
    by_name = {category.name: category for category in run.by_category}
    lost = by_name["looping"]
    assert (lost.prompts, lost.left_out_looping) == (0, sum(looping))
    assert (lost.tokens_per_second, lost.acceptance_length) == (None, None)
    assert run.left_out_looping == sum(category.left_out_looping for category in run.by_category)
    assert run.prompts == sum(category.prompts for category in run.by_category)


@pytest.mark.parametrize("batch", ["1", "2"])
def test_the_command_tells_by_category(
    file: Path, tmp_path: Path, batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = tiny_target_folder(tmp_path / "target"), tmp_path / "head"
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), head, target_name="tiny")
    how = [
        "--limit",
        "5",
        "--max-tokens",
        "6",
        "--repeats",
        in_full("2", "1"),
        "--least-distinct",
        "0",
        "--quiet",
        "--depth",
        "2",
    ]
    what = ["--target", str(target), "--head", str(head), "--prompts", str(file), "--batch", batch]
    assert main([*what, *how, "--json", str(tmp_path / "figures.json"), "--turn", "3"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.split("category ")[1].splitlines()]
    assert ["writing", "eagle", batch, "2", "fixed", "0", "4", "0"] in [line[:8] for line in lines]
    assert ["qa", "mlx-lm", "1", "-", "-", "0", "2", "0"] in [line[:8] for line in lines]
    runs = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert {run["mode"] for run in runs} <= set(MODE_NAMES)
    for run in runs:
        assert [(each["name"], each["prompts"]) for each in run["by_category"]] == [
            ("writing", 4),
            ("math", 1),
            ("qa", 2),
        ]
        assert run["identical"] in (True, None)
        assert all(each["tokens_per_second"] > 0 and each["acceptance_length"] >= 1 for each in run["by_category"])


@pytest.fixture
def little_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard library of a few files, so that all of its text is read in no time."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(4):
        words = " ".join(f"word {number * 1000 + at}" for at in range(300))
        (folder / f"m{number}.py").write_text(f'"""{words}"""\n\ndef f():\n    """{words[::-1]}"""\n')
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(folder)})


@pytest.mark.usefixtures("little_library")
def test_filler_stands_before_each_question_and_no_two_have_the_same(file: Path) -> None:
    target = tiny_target(tokenizer=True)
    target.context_length = 4096
    asked = read_questions(file)
    filled = behind_filler(asked, target, 300)
    assert [each.later for each in filled] == [each.later for each in asked]
    texts = []
    for before, after in zip(asked, filled, strict=True):
        wanted, got = (each.prompt.content[0]["content"] for each in (before, after))  # type: ignore[index]
        assert got.endswith(f"\n\n{wanted}")
        texts.append(got.removesuffix(wanted))
        added = len(after.encode(target, (), 8)) - len(before.encode(target, (), 8))
        assert 295 <= added <= 310
    assert len(set(texts)) == len(texts)
    behind = behind_filler([Question(Prompt("x = ", "here:1"))], target, 20)
    assert str(behind[0].prompt.content).endswith("\n\nx = ")
    with pytest.raises(ConfigError, match="too little text for so many prompts"):
        behind_filler(asked, target, 100_000)


@pytest.mark.usefixtures("little_library")
def test_the_command_puts_filler_before_prompts(file: Path, tmp_path: Path) -> None:
    folder, out = tiny_target_folder(tmp_path / "target"), tmp_path / "bench.json"
    flags = f"--target {folder} --prompts {file} --modes plain ngram --limit 1 --max-tokens 8 --repeats 1 --depth 2"
    assert main([*flags.split(), "--filler", "100", "--least-distinct", "0", "--quiet", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["filler"] == 100
