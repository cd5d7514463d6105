"""The command eagle-data: outputs, messages, and state after an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import capturing, cli
from eagle_mlx.data_pipelines.sources import stdlib
from eagle_mlx.data_pipelines.sources.stdlib import SourceFile
from eagle_mlx.shards import ShardReader
from tests.data_pipelines.rows import ROWS
from tests.fakes import tiny_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target_folder(tmp_path_factory.mktemp("model") / "tiny"))


def test_regenerate_collect_inspect(
    target: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, shards = str(tmp_path / "answers.jsonl"), str(tmp_path / "shards")
    argv = ["regenerate", "--target", target, "--data", chats, "--output", answers, "--max-tokens", "5"]
    assert cli.main(argv) == 0
    rows = [json.loads(line) for line in Path(answers).read_text().splitlines()]
    assert sorted(row["messages"][0]["content"] for row in rows) == [f"say {n}" for n in range(6)]
    assert "6 conversations with 6 answers of 30 tokens" in capsys.readouterr().out

    argv = [
        "collect",
        "--target",
        target,
        "--data",
        answers,
        "--output",
        shards,
        "--split",
        "all",
        "--max-length",
        "64",
    ]
    assert cli.main([*argv, "--aux-layers", "0,2"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("blas: ")
    assert "6 conversations" in printed.out
    reader = ShardReader(shards)
    assert (len(reader), reader.meta.aux_layers, reader.meta.hidden_size) == (6, (0, 2), 32)

    assert cli.main(["inspect", shards]) == 0
    assert "every SHA-256 is correct" in capsys.readouterr().out
    assert cli.main(["inspect", chats, "--target", target, "--limit", "1", "--seed", "5"]) == 0
    assert "<|im_start|>assistant\n⟦it is" in capsys.readouterr().out
    assert cli.main(["inspect", chats]) == 0
    assert "[user] say" in capsys.readouterr().out


def test_the_built_in_source(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SourceFile("m.py", "def f():\n    return 1\n")
    monkeypatch.setattr(stdlib, "iter_files", lambda _: [file])
    argv = ["collect", "--target", target, "--data", "builtin:python", "--output", str(tmp_path / "s")]
    assert cli.main([*argv, "--max-length", "128"]) == 0
    assert len(ShardReader(tmp_path / "s")) == 2


@pytest.mark.parametrize(
    ("row", "argv", "message"),
    [
        ('{"text": ', [], "bad.jsonl:2: not valid JSON"),
        ('{"prompt": "Hi"}', [], "bad.jsonl:2: no assistant turn"),
        ('{"q": 1}', [], "bad.jsonl:2: the row's keys (q) have no known shape"),
        (None, ["--max-length", "2"], "nothing to capture from"),
        (None, ["--aux-layers", "1,7"], "the target has layers 0 to 3"),
        (None, ["--aux-layers", "one"], "must be layer numbers"),
        (None, ["--target", "/nowhere/model"], "there is no folder /nowhere/model"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str | None, argv: list[str], message: str
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(json.dumps(ROWS[0]) + "\n" + (f"{row}\n" if row is not None else ""))
    command = ["collect", "--target", target, "--data", str(data), "--output", str(tmp_path / "out" / "s")]
    assert cli.main([*command, "--split", "all", "--max-length", "128", *argv]) == 2
    assert f"error: {'' if argv else tmp_path}" in (err := capsys.readouterr().err)
    assert message in err
    assert list(tmp_path.iterdir()) == [data]


def test_a_conversation_is_cut_at_the_targets_context(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "long.jsonl", tmp_path / "shards"
    data.write_text(json.dumps({"prompt": "Hi", "completion": "Yes. " * 600}))
    command = ["collect", "--target", target, "--data", str(data), "--split", "all", "--output", str(output)]
    assert cli.main(command) == 0
    assert "1 cut at 512 tokens" in capsys.readouterr().out
    assert [len(example.tokens) for example in ShardReader(output)] == [512]


@pytest.mark.parametrize("command", ["collect", "regenerate"])
def test_an_existing_output_is_kept(
    target: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    output = tmp_path / "there"
    if command == "collect":
        output.mkdir()
    mine = output / "mine" if command == "collect" else output
    mine.write_text("mine")
    assert cli.main([command, "--target", target, "--data", chats, "--output", str(output)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_too_little_space_is_said_before_the_work(
    target: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_mlx.data_pipelines.commands.bytes_per_token", lambda _: 10**15)
    argv = ["collect", "--target", target, "--data", chats, "--output", str(tmp_path / "s"), "--max-length", "64"]
    assert cli.main(argv) == 2
    assert "MB free" in capsys.readouterr().err


def test_an_interruption_leaves_nothing(
    target: str, chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(capturing, "capture_batches", interrupt)
    argv = ["collect", "--target", target, "--data", chats, "--output", str(tmp_path / "s"), "--max-length", "64"]
    assert cli.main(argv) == 130
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(
        word in printed for word in ("examples:", "builtin:python", '"messages"', "regenerate", "collect", "inspect")
    )


def test_collect_reads_a_mix_with_mapped_fields_and_leaves_out_what_cannot_be_used(
    target: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    rows = [{"q": f"ask {n}", "a": f"so {n}"} for n in range(4)]
    other.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"x": 1}]))
    argv = ["collect", "--target", target, "--output", str(tmp_path / "s"), "--split", "all", "--max-length", "64"]
    argv += ["--data", f"{chats}=0.5", f"{other}=0.5", "--map", f"{other}:prompt=q,completion=a"]
    assert cli.main(argv) == 2
    assert "other.jsonl:5: no field `q`" in capsys.readouterr().err
    assert cli.main([*argv, "--skip-bad", "--limit", "6", "--keep-turns", "1:1", "--keep-tokens", ":64"]) == 0
    assert "6 conversations, " in capsys.readouterr().out
    assert len(ShardReader(tmp_path / "s")) == 6


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-speculative-tokens", "-1"], "--num-speculative-tokens must be between 0 and 20, not -1"),
        (["--head", "/nowhere/head"], "there is no folder /nowhere/head"),
        (["--temperature", "-1"], "temperature must be"),
        (["--keep-turns", "9:"], "nothing to answer in"),
        (["--dedupe", "prompt", "--keep-turns", "4:2"], "--keep-turns 4:2: MIN must not be above MAX"),
    ],
)
def test_what_regenerate_cannot_do_is_said_before_it_begins(
    target: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    command = ["regenerate", "--target", target, "--data", chats, "--output", str(tmp_path / "a.jsonl")]
    assert cli.main([*command, *argv]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_streamed_regeneration_says_what_it_left_out(
    target: str, chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["regenerate", "--target", target, "--data", chats, chats, "--dedupe", "prompt", "--max-tokens", "3"]
    assert cli.main([*argv, "--stream", "--output", str(tmp_path / "a.jsonl")]) == 0
    assert "6 conversations read; left out: 6 as duplicates" in capsys.readouterr().out
    assert cli.main([*argv, "--output", str(tmp_path / "b.jsonl")]) == 0
    streamed, stored = ((tmp_path / name).read_text().splitlines() for name in ("a.jsonl", "b.jsonl"))
    assert sorted(streamed) == sorted(stored)


@pytest.mark.parametrize("command", ["collect", "regenerate"])
def test_errors_in_a_data_file_show_before_the_target_is_loaded(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"x": 1}\n')
    argv = [command, "--target", "/nowhere/model", "--output", str(tmp_path / "a.jsonl"), "--data"]
    assert cli.main([*argv, str(bad), "--keep-tokens", ":9"]) == 2
    assert "bad.jsonl:2: the row's keys (x) have no known shape" in capsys.readouterr().err
    assert cli.main([*argv, chats]) == 2
    assert "/nowhere/model" in capsys.readouterr().err
