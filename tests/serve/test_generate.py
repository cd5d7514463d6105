"""eagle-generate: its output on both streams, and its errors."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest

import eagle_mlx as em
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve.generate import main
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.vision_targets import picture, vision_folder

SHORT = ("--max-tokens", "12")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("generate")
    tiny_target_folder(root / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), root / "head", target_name="tiny")
    return str(root / "target"), str(root / "head")


def expected(target: str, text: str, raw: bool = False) -> str:
    prompt = text if raw else [{"role": "user", "content": text}]
    params = em.SamplingParams(max_tokens=12)
    return em.Engine(em.load_target(target)).generate([prompt], params)[0].text  # type: ignore[list-item]


def test_only_the_text_goes_to_standard_output(models: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    target, head = models
    assert main(["def f(x):", "--target", target, "--head", head, "--spec-policy", "fixed", *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == expected(target, "def f(x):") + "\n"
    assert f"speculation: eagle head {head}" in err
    assert "head precision: weights in float32" in err
    assert "12 tokens in" in err
    assert "(tau)" in err


@pytest.mark.parametrize("flags", [["--spec-decode", "none"], ["--spec-decode", "ngram", "--spec-policy", "fixed"]])
def test_the_text_does_not_depend_on_the_drafts(
    models: tuple[str, str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["def f(x):", "--target", models[0], "--quiet", *flags, *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == expected(models[0], "def f(x):") + "\n"
    assert err == ""


def test_stop_strings_and_penalties_reach_the_engine(
    models: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = expected(models[0], "def f(x):")
    stop = whole[len(whole) // 2 :][:4]
    assert main(["def f(x):", "--target", models[0], "--quiet", "--stop", stop, "--stop", "never said", *SHORT]) == 0
    assert capsys.readouterr().out == whole[: whole.find(stop)] + "\n"
    assert main(["def f(x):", "--target", models[0], "--quiet", "--repetition-penalty", "40", *SHORT]) == 0
    assert capsys.readouterr().out != whole + "\n"


def test_standard_input_and_raw_prompts(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert main(["-", "--raw", "--target", models[0], *SHORT]) == 0
    assert capsys.readouterr().out == expected(models[0], "import os\n", raw=True) + "\n"


def test_a_standard_input_that_is_not_utf_8_is_one_error(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert main(["-", "--target", models[0], *SHORT]) == 2
    assert "error: standard input cannot be read ('utf-8' codec can't decode byte 0xe9" in capsys.readouterr().err


def test_a_file_gives_one_row_per_prompt_in_order(models: tuple[str, str], tmp_path: Path) -> None:
    texts = ["import os", "x", "class A:\n    pass", "def f(x):"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    files = ["--file", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "a.jsonl"), "--batch", "3", "--quiet"]
    assert main([*files, "--target", models[0], "--head", models[1], *SHORT]) == 0
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [expected(models[0], text, raw=True) for text in texts]
    assert all(row["finish_reason"] in ("stop", "length") and row["completion_tokens"] <= 12 for row in rows)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the answers so far are in"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "cannot be written (No space left on device); the answers",
        ),
    ],
)
def test_answers_are_kept_if_a_file_of_prompts_is_not_finished(
    models: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    reason: str,
) -> None:
    step, texts = em.Engine.step, ["import os", "x", "class A:\n    pass", "def f(x):"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

    def fail_at_the_end(engine: em.Engine) -> object:
        if engine.active == 1 and not engine.waiting:
            raise error
        return step(engine)

    files = ["--file", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "a.jsonl"), "--batch", "1", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(em.Engine, "step", fail_at_the_end)
        assert main([*files, "--target", models[0], "--spec-decode", "none", *SHORT]) == code
    assert reason in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl.part").read_text().splitlines()]
    assert [row["text"] for row in rows] == [expected(models[0], text, raw=True) for text in texts[:3]]
    assert not (tmp_path / "a.jsonl").exists()


def test_lossy_acceptance_is_announced_and_marked(models: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    lossy = ["--acceptance", "threshold", "--acceptance-threshold", "0.001", "--temperature", "1", "--no-ngram"]
    assert main(["def f(x):", "--target", models[0], "--head", models[1], *lossy, *SHORT]) == 0
    printed = capsys.readouterr().err
    assert "acceptance: threshold 0.001, which is lossy" in printed
    assert "; lossy; " in printed


def test_rows_of_turns_are_answered_turn_by_turn(models: tuple[str, str], tmp_path: Path) -> None:
    questions = [["import os", "and sys?"], ["x"], ["def f(x):", "why?", "and then?"]]
    abouts: list[dict[str, str]] = [{"category": "code"}, {"category": "code"}, {}]
    lines = [{"question_id": 1, **about, "turns": turns} for about, turns in zip(abouts, questions, strict=True)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--file", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "a.jsonl"), "--quiet"]
    assert main([*files, "--target", models[0], "--spec-decode", "none", *SHORT]) == 0
    engine, params = em.Engine(em.load_target(models[0])), em.SamplingParams(max_tokens=12)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for about, turns, row in zip(abouts, questions, rows, strict=True):
        assert row == {**about, "turns": row["turns"]}
        messages: list[dict[str, str]] = []
        for turn, answer in zip(turns, row["turns"], strict=True):
            messages.append({"role": "user", "content": turn})
            assert answer["text"] == engine.generate([messages], params)[0].text
            messages.append({"role": "assistant", "content": answer["text"]})


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "give one prompt"),
        (["x", "--file", "p.jsonl"], "give one prompt"),
        (["x", "--prompt", "y"], "give one prompt"),
        (["x", "--output", "a.jsonl"], "--output needs --file"),
        ([""], "the prompt is empty"),
        (["x", "--raw", "--system", "y"], "--system needs a chat template"),
        (["x", "--top-p", "2"], "--top-p"),
        (["--file", "missing.jsonl"], "cannot be read"),
        (["--file", "p.jsonl", "--system", "y"], "--system is for a single prompt"),
        (["--file", "p.jsonl", "--raw"], "--raw is for a single prompt"),
        (["x " * 600], "does not fit the target's context"),
        (["x", "--spec-decode", "eagle"], "give --head"),
    ],
)
def test_contradictory_options_are_refused(
    models: tuple[str, str], args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*args, "--target", models[0]]) == 2
    out, err = capsys.readouterr()
    assert reason in err
    assert out == ""


def test_an_existing_output_is_not_overwritten(models: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "a.jsonl").write_text("precious")
    assert (
        main(["--file", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "a.jsonl"), "--target", models[0]]) == 2
    )
    assert (tmp_path / "a.jsonl").read_text() == "precious"


def test_an_image_is_shown_before_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_vlm")
    target = str(vision_folder(tmp_path / "target", "mistral3"))
    (tmp_path / "a.png").write_bytes(picture(1, 48, 64))
    shown = [{"type": "image", "image": picture(1, 48, 64)}, {"type": "text", "text": "def f(x):"}]
    outputs = em.Engine(em.load_target(target)).generate(
        [[{"role": "user", "content": shown}]], em.SamplingParams(max_tokens=12)
    )
    args = ["def f(x):", "--target", target, "--quiet", *SHORT]
    assert main([*args, "--image", str(tmp_path / "a.png")]) == 0
    assert capsys.readouterr().out == outputs[0].text + "\n"
    for more, reason in ((["--image", str(tmp_path / "b.png")], "b.png cannot be read"), (["--raw"], "chat template")):
        assert main([*args, "--image", str(tmp_path / "a.png"), *more]) == 2
        assert reason in capsys.readouterr().err


def test_an_image_for_a_model_that_reads_only_text_is_refused(
    models: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    assert main(["hi", "--target", models[0], "--quiet", "--image", str(tmp_path / "a.png")]) == 2
    assert "reads only text" in capsys.readouterr().err
