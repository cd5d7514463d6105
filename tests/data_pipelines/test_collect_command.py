"""`eagle-data collect` when it is interrupted, repeated, or asked to repair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.data_pipelines import capturing, cli
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
    said = capsys.readouterr().err
    assert "interrupted; 1 of 3 shards are kept, and the same command continues from there" in said
    assert cli.main(["inspect", str(tmp_path / "s.unfinished")]) == 2
    stop.undo()
    assert cli.main([*command, "--bits", "8"]) == 2
    assert "something else (bits: 16 there, 8 now)" in capsys.readouterr().err
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "1 of 3 shards are complete and are kept" in said
    assert "in 16 bits; " in said
    ShardReader(tmp_path / "s").verify()
    assert not unfinished_folder(tmp_path / "s").exists()


def test_repair_needs_the_folder_alone(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    assert cli.main([*command, "--bits", "8"]) == 0
    whole = content(folder)
    for repair in (["collect", "--repair", str(folder)], [*command, "--bits", "8", "--resume"]):
        (folder / "shard-00001.safetensors").write_bytes(b"")
        capsys.readouterr()
        assert cli.main(["inspect", str(folder)]) == 2
        assert "shard-00001.safetensors is cut short" in capsys.readouterr().err
        assert cli.main(repair) == 0
        said = capsys.readouterr().out
        assert "shard-00001.safetensors is cut short: 0 bytes instead of" in said
        assert "2 of 3 shards are complete" in said
        assert content(folder) == whole
        assert (folder / "shard-00001.safetensors.damaged").exists()


def test_repair_of_what_is_whole_changes_nothing(command: list[str], tmp_path: Path) -> None:
    assert cli.main(command) == 0
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "s").iterdir()}
    assert cli.main(["collect", "--repair", str(tmp_path / "s")]) == 0
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "s").iterdir()} == before


def test_a_moved_folder_and_a_moved_target_are_repaired(command: list[str], target: str, tmp_path: Path) -> None:
    assert cli.main(command) == 0
    whole, moved = content(tmp_path / "s"), tmp_path / "moved"
    (tmp_path / "s").rename(moved)
    (moved / "shard-00002.safetensors").unlink()
    other = tiny_target_folder(tmp_path / "elsewhere")
    assert cli.main(["collect", f"--repair={moved}", "--target", str(other)]) == 0
    assert content(moved) == whole


@pytest.mark.parametrize("what", ["no command", "other data", "no folder"])
def test_what_cannot_be_repaired(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "no command":
        opened = capturing.ShardCapture.open

        def silent(self: Any, folder: Path, overwrite: bool, resume: bool, _: object) -> object:
            return opened(self, folder, overwrite, resume)

        monkeypatch.setattr(capturing.ShardCapture, "open", silent)
    assert what == "no folder" or cli.main(command) == 0
    if what == "other data":
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    assert cli.main(["collect", "--repair", str(tmp_path / "s")]) == 2
    said = capsys.readouterr().err
    expected = {
        "no command": "does not record the command that made it; give that `eagle-data collect` command again with",
        "other data": "was made from something else (conversations: 40 of",
        "no folder": "is not a folder of shards",
    }
    assert expected[what] in said


def test_too_little_space_keeps_what_there_is(
    command: list[str], tmp_path: Path, stop: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 130
    before = content(unfinished_folder(tmp_path / "s"))
    stop.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "bytes_per_token", lambda _: 10**15)
        assert cli.main(command) == 2
    assert "MB free" in capsys.readouterr().err
    assert content(unfinished_folder(tmp_path / "s")) == before
    assert cli.main(command) == 0


def test_26_collect_and_inspect_say_what_the_template_leaves_out(
    command: list[str], target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    asked = [{"role": "user", "content": "Warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.writelines(json.dumps({"messages": asked}) + "\n" for _ in range(12))
    for argv in (command, ["inspect", str(tmp_path / "chats.jsonl"), "--target", target, "--limit", "1"]):
        assert cli.main(argv) == 0
        said = capsys.readouterr().out
        assert "the chat template of " in said
        assert "tiny does not render tool calls: 12 conversations affected" in said
        assert "answers that render as nothing: 12 conversations skipped" in said
    assert len(ShardReader(tmp_path / "s")) == 40
