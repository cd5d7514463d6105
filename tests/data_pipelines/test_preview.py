"""The output of `eagle-data inspect`: marks around learned text, and lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import cli
from eagle_mlx.data_pipelines.commands import escape_control_characters, histogram, marked
from eagle_mlx.data_pipelines.rendering import Sample
from tests.fakes import tiny_target_folder


def test_what_is_learned_is_between_marks() -> None:
    assert marked(Sample([1, 2, 3, 4], [0, 1, 1, 0]), lambda tokens: "".join(map(str, tokens))) == "1⟦23⟧4"


def test_data_cannot_command_the_terminal() -> None:
    assert escape_control_characters("a\x1b[2J\tb\nc\x07\x9bd") == "a\\x1b[2J\tb\nc\\x07\\x9bd"


def test_the_histogram_counts_every_length_once() -> None:
    text = histogram([1, 16, 17, 200, 5000], "tokens")
    lines = text.splitlines()
    assert lines[0] == "5 conversations, lengths in tokens:"
    counts = {line.split()[2]: int(line.split()[-1]) for line in lines if line.startswith("  up to")}
    assert counts == {"16": 2, "32": 1, "64": 0, "128": 0, "256": 1, "512": 0, "1,024": 0, "2,048": 0, "4,096": 0,
                      "8,192": 1}  # fmt: skip
    assert lines[-1] == "shortest 1, median 17, mean 1,047, 90 % below 5,000, 99 % below 5,000, longest 5,000"
    assert "█" in lines[1]
    assert histogram([], "tokens").startswith("no conversations")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target_folder(tmp_path_factory.mktemp("model") / "tiny"))


def test_inspect_shows_some_and_measures_more(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    rows = [{"q": f"say {n}", "a": f"it is {n}"} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    argv = ["inspect", str(path), "--map", "prompt=q,completion=a", "--dedupe", "prompt", "--limit", "2"]
    assert cli.main([*argv, "--target", target]) == 0
    printed = capsys.readouterr().out
    assert printed.count("⟦it is") == 2
    assert "8 conversations read; left out: 1 as duplicates" in printed
    assert "8 conversations, lengths in tokens:" in printed
    assert "tokens to learn (" in printed

    assert cli.main([*argv, "--histogram", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("[assistant] it is") == 2
    assert "lengths" not in printed


def test_prompts_alone_and_tools_can_be_looked_at(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "say a\x1b[2J", "tools": [{"name": "f"}]}) + "\n")
    assert cli.main(["inspect", str(path), "--target", target]) == 0
    assert "0 to learn" in capsys.readouterr().out
    assert cli.main(["inspect", str(path)]) == 0
    assert '[tools] [{"name": "f"}]\n[user] say a\\x1b[2J' in capsys.readouterr().out


def test_conversations_that_the_template_refuses_are_counted(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": prompt, "completion": "so"} for prompt in ("a", "bad", "b", "bad", "bad")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = (
        "{% for m in messages %}{% if 'bad' in m.content|string %}{{ no() }}{% endif %}{{ m.content }}{% endfor %}"
    )
    argv = ["inspect", str(path), "--target", target, "--chat-template", template]
    assert cli.main(argv) == 2
    assert "the chat template refuses this conversation" in capsys.readouterr().err
    assert cli.main([*argv, "--skip-bad"]) == 0
    printed = capsys.readouterr().out
    assert "5 conversations read; 3 more refused by the chat template\n" in printed
    for seed in ("0", "1", "2", "3"):  # in any order, the first that can be rendered are shown
        assert cli.main([*argv, "--skip-bad", "--limit", "2", "--seed", seed]) == 0
        assert capsys.readouterr().out.count(" to learn, between") == 2
    assert "2 conversations, lengths in tokens:" in printed
