"""`eagle-bench --race`: one prompt, several modes side by side."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

import eagle_mlx as em
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.bench.cli import main
from eagle_mlx.serve.bench.modes import BenchModels, Decoding, EngineMode
from eagle_mlx.serve.bench.race import race, wrapped
from tests.fakes import tiny_head, tiny_target, tiny_target_folder

PROMPT = "def f(x):"
LINE = r"{} +36 tokens in [\d.]+ s, [\d.]+ tokens/s, [\d.]+x plain, τ [\d.]+, {}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    root = tmp_path_factory.mktemp("race")
    tiny_target_folder(root / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), root / "head", target_name="tiny")
    return ("--target", str(root / "target"), "--head", str(root / "head"), "--max-tokens", "36", "--ignore-eos")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_each_mode_has_a_line_with_its_verdict(
    models: tuple[str, ...], temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--race", PROMPT, *models, "--temperature", temperature]) == 0
    names = ["plain", "ngram throughput/8", "eagle throughput/8", "hybrid throughput/8"]
    lines = "".join(LINE.format(name, "reference" if name == "plain" else "identical") for name in names)
    out = capsys.readouterr().out
    assert re.search(lines + r"\Z", out), out
    assert "\x1b" not in out


def test_a_race_of_few_tokens_is_not_timed(models: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--race", PROMPT, *models, "--modes", "plain", "ngram", "--max-tokens", "9"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"ngram throughput/8  9 tokens in [\d.]+ s, too few to time, τ [\d.]+, identical", last)


def test_a_terminal_shows_the_modes_side_by_side(models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "62")
    monkeypatch.setenv("LINES", "12")
    assert main(["--race", PROMPT, *models, "--policy", "fixed", "--depth", "3", "--modes", "mlx-lm", "ngram"]) == 2
    assert (
        main(["--race", PROMPT, *models[:-1], "--policy", "fixed", "--depth", "3", "--modes", "mlx-lm", "ngram"]) == 0
    )
    frames = re.split("\x1b\\[\\d+A\r", screen.getvalue())
    last = [line.split("\x1b[K")[0] for line in frames[-1].split("\n\n")[0].split("\n")]
    assert last[0].split() == ["mlx-lm", "ngram", "fixed/3"]
    assert re.fullmatch(r"[\d.]+ tokens/s +[\d.]+ tokens/s", last[1])
    assert last[2].split() == ["reference", "identical"]
    assert all(len(line) <= 62 and line[:30].strip() == line[32:].strip() for line in last[3:])


def test_another_text_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(EngineMode):
        def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
            [output] = yield from super().decode(prompts, params)
            wrong = (output.tokens[3] + 1) % 64
            return [replace(output, tokens=[*output.tokens[:3], wrong, *output.tokens[4:]])]

    target = tiny_target(tokenizer=True)
    modes = [mode("plain", BenchModels(target), 1) for mode in (EngineMode, Other)]
    assert not race(target, modes, [5, 6], em.SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
    assert "differs from token 4\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--race", " "), "the prompt of --race is empty"),
        (("--race", PROMPT, "--batch", "2"), "leave out --batch"),
        (("--race", PROMPT, "--json", "x.json"), "leave out --json"),
        (("--race", PROMPT, "--max-tokens", "600"), "do not fit the target's context"),
    ],
)
def test_what_a_race_cannot_do_is_refused(
    models: tuple[str, ...], flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*models, *flags]) == 2
    assert problem in capsys.readouterr().err


def test_text_is_wrapped_by_the_width_of_its_characters() -> None:
    assert wrapped("abcd\n\te", 3) == ["abc", "d  ", "   ", " e "]
    assert wrapped("a漢字", 4) == ["a漢 ", "字  "]
    assert wrapped("\x1b[31mé\u0301", 8) == [" [31mé\u0301  "]
