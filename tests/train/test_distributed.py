"""Distributed training gives the same result as one process with all rows."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.train.data.batches import Batches
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.distributed import World
from tests.fakes import talking_target_folder, tiny_adapters, tiny_target_folder
from tests.full import in_full
from tests.processes import needs_ring, printed
from tests.train.worker import CONFIG, conversations, learnt, whole_run


def together(count: int, folder: Path, *arguments: str) -> list[Any]:
    """Return the output of each of `count` processes of worker.py."""
    return [json.loads(out.splitlines()[-1]) for out in printed(count, folder, "tests.train.worker", *arguments)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a folder, and the output of two processes of worker.py that make a run there."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, together(2, folder, str(folder), "3")


@needs_ring
def test_processes_learn_like_one_process_with_all_their_rows(tmp_path: Path, pair: tuple[Path, list[Any]]) -> None:
    count = in_full(3, 2)
    reports = together(count, tmp_path) if count > 2 else pair[1]
    assert [(report["rank"], report["size"]) for report in reports] == [(rank, count) for rank in range(count)]
    alone = learnt(CONFIG.changed(rows=count * CONFIG.optimization.rows), World.single())
    for report in reports:
        assert report["received"] == {"place": [1, 2.5], "who": 0}
        assert report["stop"] == [False, True]
        assert report["weights"] == reports[0]["weights"], "heads that began differently are alike, bit by bit"
        assert len(report["results"]) == len(alone["results"])
        for ours, theirs in zip(report["results"], alone["results"], strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert (ours["tokens"], ours["loss_tokens"]) == (theirs["tokens"], theirs["loss_tokens"])
                for name in ("loss", "loss_by_step", "feature_loss_by_step", "accuracy_by_step"):
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    rows = np.array([report["rows"] for report in reports])
    assert rows.sum(axis=0).tolist() == alone["rows"]
    assert rows.min() == 0, "a process without rows takes the step all the same"
    assert [result is None for result in alone["results"]].count(True) == 1, "and so it is with a batch without loss"


@needs_ring
def test_two_processes_equal_one_with_twice_the_rows(tmp_path: Path, pair: tuple[Path, list[Any]]) -> None:
    """Also if the second process is asked to stop, and the run continues later."""
    compared = ("step", "tokens", "loss", "grad_norm")
    (tmp_path / "alone").mkdir()
    alone = whole_run(tmp_path / "alone", World.single(), 2 * CONFIG.optimization.rows)
    folder, (report, other) = pair
    assert (report["stopped"], report["finished"]) == (True, False)
    assert (other["stopped"], other["steps"]) == (False, [])
    assert (folder / "out" / "report.json").exists()
    first = report["steps"]
    assert [line["step"] for line in first] == [line["step"] for line in alone] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(first, alone, strict=True):
        assert [ours[name] for name in compared] == pytest.approx([theirs[name] for name in compared], rel=1e-4)


@needs_ring
def test_the_command_takes_settings_and_made_up_data_from_rank_zero(tmp_path: Path) -> None:
    target, places = talking_target_folder(tmp_path / "target", seed=2), [tmp_path / "a", tmp_path / "b"]
    for place in places:
        tiny_adapters(place / "adapters")
    settings = "--head eagle --length 64 --max-length 64 --rows 2 --max-steps 1 --eval-prompts 1 --eval-tokens 2"
    flags = ["--target", str(target), "--adapter-path", "adapters", "--output", "out/head", "--self-tokens", "600"]
    flags += settings.split()
    first, second = printed(2, tmp_path, "eagle_mlx.train.cli", *flags, places=places)
    assert "the head is in out/head/best" in first
    assert second == ""
    report = json.loads((places[0] / "out/head/report.json").read_text())
    assert (report["steps"], report["config"]["adapter_path"]) == (1, "adapters")
    made = [(place / "out/head.self.jsonl").read_bytes() for place in places]
    assert made[0] == made[1]
    assert not (places[1] / "out/head").exists()


@needs_ring
def test_training_with_a_target_split_over_two_processes(tmp_path: Path) -> None:
    target, data = tiny_target_folder(tmp_path / "target"), tmp_path / "data.jsonl"
    texts = [f"number {index} and what comes behind it" for index in range(in_full(50, 24))]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": a[::-1]}]} for a in texts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    settings = "--shard tensor --length 64 --rows 2 --max-steps 1 --eval-prompts 1 --eval-tokens 2 --unroll 2"
    flags = ["--target", str(target), "--data", str(data), "--output", str(out), *settings.split()]
    first, second = printed(2, tmp_path, "eagle_mlx.train.cli", *flags)
    assert "the head is in" in first
    assert second == ""
    report = json.loads((out / "report.json").read_text())
    assert (report["steps"], report["config"]["shard"]) == (1, "tensor")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("skip", [0, 1])
def test_every_row_is_read_by_one_process(size: int, skip: int) -> None:
    samples = InMemory(conversations())
    with closing(Batches(samples, 2 * size, 24, seed=1).epoch(1, skip)) as stream:
        whole = list(stream)
    parts = []
    for rank in range(size):
        with closing(Batches(samples, 2, 24, 1, World(rank, size)).epoch(1, skip)) as stream:
            parts.append(list(stream))
    for number, rows in enumerate(whole):
        mine = [part[number] for part in parts]
        assert np.array_equal(np.concatenate([share.tokens for share in mine if len(share.tokens)]), rows.tokens)
        assert [share.first for share in mine] == np.cumsum([0, *(len(share.tokens) for share in mine)])[:-1].tolist()
        assert max(len(share.tokens) for share in mine) - min(len(share.tokens) for share in mine) <= 1
    assert all(len(part) == len(whole) for part in parts)


def test_a_single_process_sends_nothing() -> None:
    world, counts, array = World.single(), np.array([3, 4]), mx.array([1.0])
    assert world.is_rank_zero
    assert world.all_sum(counts) is counts
    assert world.broadcast({"a": 1}) == {"a": 1}
    assert (world.any(True), world.any(False)) == (True, False)
    assert world.broadcast_arrays({"a": array})["a"] is array
    assert world.all_sum_tree({"a": array})["a"] is array
    assert world.in_turn(lambda: 5) == 5


def test_a_process_that_finds_no_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    assert World.init() == World.single()
    monkeypatch.setenv("MLX_RANK", "1")
    with pytest.raises(ConfigError, match="process 1 of at least 2 sees only 1"):
        World.init()
