"""`eagle-data collect` when it is interrupted or repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import cli
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import ShardReader, ShardWriter, unfinished_folder
from tests.fakes import tiny_target_folder

ROWS = [{"prompt": f"say {n}", "completion": f"it is {n}, and " * 40} for n in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def command(target: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    argv = [
        "collect",
        "--target",
        target,
        "--data",
        str(path),
        "--split",
        "all",
        "--max-length",
        "300",
        "--batch-tokens",
        "512",
    ]
    return [*argv, "--output", str(tmp_path / "s")]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Interrupt every capture when its first shard is written; undo with `stop.undo()`."""
    write = ShardWriter.write

    def once(self: ShardWriter, index: int, samples: Sequence[Example]) -> None:
        write(self, index, samples)
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "write", once)
    return monkeypatch


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix == ".safetensors"}


def test_the_same_command_goes_on(
    command: list[str], tmp_path: Path, stop: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 130
    printed = capsys.readouterr().err
    assert "interrupted; 1 of 3 shards are kept, and the same command continues from there" in printed
    assert cli.main(["inspect", str(tmp_path / "s.unfinished")]) == 2
    stop.undo()
    assert cli.main([*command, "--bits", "8"]) == 2
    assert "something else (bits: 16 there, 8 now)" in capsys.readouterr().err
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "1 of 3 shards are complete and are kept" in printed
    assert "in 16 bits; " in printed
    ShardReader(tmp_path / "s").verify()
    assert not unfinished_folder(tmp_path / "s").exists()


def test_damaged_shards_are_captured_again(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    assert cli.main(command) == 0
    whole = content(folder)
    (folder / "shard-00001.safetensors").write_bytes(b"")
    assert cli.main(["inspect", str(folder)]) == 2
    assert "shard-00001.safetensors is cut short: 0 bytes instead of" in capsys.readouterr().err
    assert cli.main([*command, "--bits", "8", "--resume"]) == 2
    assert "has a capture of something else (bits: 16 there, 8 now)" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    assert "2 of 3 shards are complete and are kept" in capsys.readouterr().out
    assert content(folder) == whole


def test_too_little_space_keeps_what_there_is(
    command: list[str], tmp_path: Path, stop: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 130
    before = content(unfinished_folder(tmp_path / "s"))
    stop.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_mlx.data_pipelines.commands.bytes_per_token", lambda _: 10**15)
        assert cli.main(command) == 2
    assert "MB free" in capsys.readouterr().err
    assert content(unfinished_folder(tmp_path / "s")) == before
    assert cli.main(command) == 0


def test_collect_and_inspect_say_what_the_template_leaves_out(
    command: list[str], target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [{"role": "user", "content": "Warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.writelines(json.dumps({"messages": messages}) + "\n" for _ in range(12))
    for argv in (command, ["inspect", str(tmp_path / "chats.jsonl"), "--target", target, "--limit", "1"]):
        assert cli.main(argv) == 0
        printed = capsys.readouterr().out
        assert "the chat template of " in printed
        assert "tiny does not render tool calls: 12 conversations affected" in printed
        assert "answers that render as nothing: 12 conversations skipped" in printed
    assert len(ShardReader(tmp_path / "s")) == 40


@pytest.mark.parametrize(("layers", "is_noted"), [(("--aux-layers", "0,1"), True), ((), False)])
def test_layers_that_heads_of_two_layers_need_are_named(
    command: list[str], layers: tuple[str, ...], is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--limit", "2", *layers]) == 0
    assert ("heads of two layers, such as P-EAGLE, need layer 2 too" in capsys.readouterr().out) == is_noted
