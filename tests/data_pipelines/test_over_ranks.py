"""Two processes share the same made-up data as one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines import DataConfig, cli, read_conversations
from eagle_mlx.shards import ShardReader
from tests.fakes import talking_target_folder
from tests.full import FULL
from tests.processes import ended, needs_ring, printed, start

MODULE = "eagle_mlx.data_pipelines.cli"
pytestmark = needs_ring


@pytest.mark.parametrize(("shard", "architecture"), [("tensor", "qwen3"), ("pipeline", "qwen2")])
def test_conversations_are_made_and_answered_alike(shard: str, architecture: str, tmp_path: Path) -> None:
    target = ["--target", str(talking_target_folder(tmp_path / "target", architecture=architecture))]
    made, shared = tmp_path / "made.jsonl", tmp_path / "shared.jsonl"
    make = ["make", *target, "--rows", "5", "--max-tokens", "8", "--user-tokens", "40", "--batch", "3"]
    assert cli.main([*make, "--output", str(made)]) == 0
    if FULL or shard == "tensor":
        [printed_text, nothing] = printed(2, tmp_path, MODULE, *make, "--output", str(shared), "--shard", shard)
        assert "5 conversations of " in printed_text
        assert nothing == ""
        assert shared.read_bytes() == made.read_bytes()
    if shard == "tensor":
        shards = str(tmp_path / "shards")
        collect = ["collect", *target, "--data", str(made), "--max-length", "64", "--output", shards]
        printed(2, tmp_path, MODULE, *collect, "--shard", shard)
        assert len(ShardReader(Path(shards))) == len(list(read_conversations(DataConfig((str(made),)), "train")))
    if not FULL and shard == "tensor":
        return
    answered, both = tmp_path / "answered.jsonl", tmp_path / "both.jsonl"
    answer = ["regenerate", *target, "--data", str(made), "--max-tokens", "8", "--temperature", "1", "--split", "all"]
    assert cli.main([*answer, "--output", str(answered)]) == 0
    printed(2, tmp_path, MODULE, *answer, "--output", str(both), "--shard", shard)
    assert both.read_bytes() == answered.read_bytes()


@pytest.mark.skipif(not FULL, reason="tests/eagle_mlx/test_ranks.py has the refusal; this is its command")
def test_layers_of_other_machines_are_not_captured(tmp_path: Path) -> None:
    target, data = talking_target_folder(tmp_path / "target", architecture="qwen2"), tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    out = tmp_path / "shards"
    flags = ["collect", "--target", str(target), "--data", str(data), "--split", "all", "--output", str(out)]
    processes = start(2, tmp_path, MODULE, *flags, "--max-length", "64", "--shard", "pipeline")
    (_, errors), _ = ended(processes)
    assert processes[0].returncode == 2
    assert "the layers are on several machines" in errors
    assert not out.exists()
