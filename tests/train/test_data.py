"""A run's data: sources with weights, maps and filters, and held-out prompts from the same reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_mlx.data_pipelines import Conversation, capturing, held_out_prompts
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.errors import ConfigError, DataError, OutputError
from eagle_mlx.hidden_states import Bits, Example
from eagle_mlx.shards import ShardMeta, ShardWriter, bytes_per_token
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import storage
from eagle_mlx.train.data.examples import OnDisk
from eagle_mlx.train.data.sources import TrainData, heldout_prompts, training_data
from eagle_mlx.train.data.storage import choose_states
from tests.fakes import tiny_target

TARGET = tiny_target(vocab=4096, tokenizer=True)


def chats(folder: Path, name: str, count: int, question: str = "prompt", answer: str = "completion") -> str:
    rows = [{question: f"{name}: what is {i} + {i}?", answer: f"It is {2 * i}."} for i in range(count)]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def config(*data: str, **settings: Any) -> TrainConfig:
    return TrainConfig.of(target="tiny", data=data, draft_vocab=0, eval_tokens=8, cache_gb=0.0, **settings)


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    a, b = chats(tmp_path, "a", 100), chats(tmp_path, "b", 100)
    data = training_data(TARGET, config(f"{a}=0.75", f"{b}=0.25", limit=80))
    assert data.report["conversations"] == 80
    assert TARGET.tokenizer is not None
    texts = [TARGET.tokenizer.decode(data.samples[i].tokens.tolist()) for i in range(80)]
    assert sum("a: what" in text for text in texts) == 60


def test_maps_and_filters_reach_training_and_held_out_prompts(tmp_path: Path) -> None:
    odd, usual = chats(tmp_path, "odd", 100, "q", "a"), chats(tmp_path, "usual", 100)
    mapped = config(odd, usual, map=(f"{odd}:prompt=q,completion=a",), dedupe="prompt", keep_tokens=":40")
    report = training_data(TARGET, mapped).report
    assert report["conversations"] == 180
    assert report["left_out"] == 0
    prompts = heldout_prompts(TARGET, mapped).tokens
    assert len(prompts) == 20
    assert TARGET.tokenizer is not None
    texts = [TARGET.tokenizer.decode(prompt) for prompt in prompts]
    assert ["odd:" in text for text in texts[:2]] == [True, False], "from both sources in turn"
    assert len(heldout_prompts(TARGET, config(usual, eval_data=odd, map=("prompt=q,completion=a",))).tokens) == 100
    with pytest.raises(DataError, match="no usable conversations"):
        training_data(TARGET, config(usual, keep_tokens="500:"))


def test_measured_prompts_are_not_learned(tmp_path: Path) -> None:
    source = chats(tmp_path, "all", 200)
    weighted = config(f"{source}=1")
    data = training_data(TARGET, weighted)
    learnt = [data.samples[i].tokens.tolist() for i in range(data.report["conversations"])]
    prompts = heldout_prompts(TARGET, weighted).tokens
    assert len(learnt) + len(prompts) == 200
    assert not any(tokens[: len(prompt)] == prompt for prompt in prompts for tokens in learnt)


def test_conversations_in_the_training_data_are_no_prompts(tmp_path: Path) -> None:
    """Also if it is shards, or the same file under another name."""
    source = chats(tmp_path, "all", 200)
    data = training_data(TARGET, config(source, output=str(tmp_path / "head"), states="disk"))
    assert isinstance(data.samples, OnDisk)
    assert data.samples.keys == training_data(TARGET, config(source, states="online")).samples.keys
    assert {data.samples[i].key for i in range(5)} < data.samples.keys
    held_out = heldout_prompts(TARGET, config(source))
    (tmp_path / "other").mkdir()
    same = str(tmp_path / "other" / ".." / "all.jsonl")
    from_shards = TrainConfig.of(target="tiny", shards=(f"{tmp_path}/head.shards",), eval_data=source, eval_tokens=8)
    for settings in (from_shards, config(source, eval_data=same)):
        prompts = heldout_prompts(TARGET, settings, data.samples.keys)
        assert prompts.tokens == held_out.tokens
        assert prompts.left_out == data.report["conversations"] == 200 - len(held_out.tokens)
        assert prompts.facts(data.samples.keys) == {"prompts_held_out": True, "prompts_left_out": prompts.left_out}
        assert not heldout_prompts(TARGET, settings).facts(data.samples.keys)["prompts_held_out"]
        assert not prompts.facts({0})["prompts_held_out"], "shards that do not know what they hold"
    learned = tmp_path / "learned.jsonl"
    keys = {line: conversation(line).prompt_key() for line in Path(source).read_text().splitlines(keepends=True)}
    held = held_out_prompts(keys.values())
    learned.write_text("".join(line for line, key in keys.items() if key not in held), encoding="utf-8")
    with pytest.raises(DataError, match=rf"learned.jsonl: .*all {prompts.left_out} are trained on.*--eval-data"):
        heldout_prompts(TARGET, config(source, eval_data=str(learned)), data.samples.keys)


def conversation(line: str) -> Conversation:
    return parse_row(json.loads(line), "")


def test_skip_bad_skips_unusable_rows(tmp_path: Path) -> None:
    source = Path(chats(tmp_path, "some", 60))
    source.write_text(source.read_text() + '{"prompt": 7}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"some.jsonl:61"):
        training_data(TARGET, config(str(source)))
    assert training_data(TARGET, config(str(source), skip_bad=True)).report["left_out"] == 1


def test_answers_that_the_template_does_not_render_are_not_learned(tmp_path: Path, capsys: Any) -> None:
    source = Path(chats(tmp_path, "some", 115))  # as many are held out with one question more
    thought = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    before = training_data(TARGET, config(str(source))).report
    source.write_text(source.read_text() + f"{json.dumps({'messages': thought})}\n" * 9, encoding="utf-8")
    after = training_data(TARGET, config(str(source)), progress=True).report
    assert after == {**before, "left_out": 9}
    printed = capsys.readouterr().err
    assert f"the chat template of {TARGET.name} does not render reasoning: 9 conversations affected" in printed
    assert "answers that render as nothing: 9 conversations skipped" in printed
    source.write_text(f"{json.dumps({'messages': thought})}\n" * 9, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"no usable conversations in .*\n  the chat template of .* render reasoning: 9"
    ):
        training_data(TARGET, config(str(source)))


def places(data: TrainData) -> dict[tuple[int, ...], list[Bits]]:
    """Return every sample's states by its tokens."""
    states = {}
    for index in range(len(data.samples.lengths)):
        sample = data.samples[index]
        assert sample.states is not None
        states[tuple(sample.tokens.tolist())] = [sample.states.features, sample.states.last]
    return states


def test_states_are_kept_where_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = chats(tmp_path, "a", 60), str(tmp_path / "head")
    settings = config(source, output=output).changed(cache_gb=1.0)
    in_memory = training_data(TARGET, settings)
    assert (in_memory.place, in_memory.report["states"]) == ("memory", "captured once, kept in memory")
    monkeypatch.setattr(storage, "free_memory", lambda: 1000)
    on_disk = training_data(TARGET, settings)
    assert on_disk.place == "disk"
    assert on_disk.report["states"] == "shards head.shards", "reports name no folder of this machine"
    held = places(on_disk)
    assert len(held) > 50
    for tokens, states in places(in_memory).items():
        assert all(np.array_equal(a, b) for a, b in zip(states, held[tokens], strict=True))
    monkeypatch.setattr(storage, "free_disk", lambda folder: 0)
    assert training_data(TARGET, settings).place == "disk"  # existing files need no more space
    elsewhere = settings.changed(cache_dir=str(tmp_path / "none"))
    assert training_data(TARGET, elsewhere).place == "online"
    assert training_data(TARGET, config(source)).place == "online"  # an empty cache
    monkeypatch.setattr(storage, "free_memory", lambda: 10**9)
    assert training_data(TARGET, elsewhere).place == "memory"
    assert training_data(TARGET, elsewhere, reserve=10**9).place == "online"


def test_an_interrupted_capture_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(chats(tmp_path, "a", 700), states="disk", cache_bits=8, cache_dir=str(tmp_path / "kept"))
    whole = training_data(TARGET, settings.changed(cache_dir=str(tmp_path / "whole")))
    written, write = [], ShardWriter.write

    def cut_short(self: ShardWriter, index: int, samples: Sequence[Example]) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(index)
        write(self, index, samples)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", cut_short)
        with pytest.raises(KeyboardInterrupt):
            training_data(TARGET, settings)
    with monkeypatch.context() as patch:
        patch.setattr(
            ShardWriter, "write", lambda self, index, samples: (written.append(index), write(self, index, samples))
        )
        again = training_data(TARGET, settings)
    assert len(written) == len(set(written)) > 2  # no shard is captured twice
    for (tokens, states), (others, same) in zip(places(whole).items(), places(again).items(), strict=True):
        assert tokens == others
        assert all(np.array_equal(a, b) for a, b in zip(states, same, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "capture_batches", None)
        assert training_data(TARGET, settings).place == "disk"  # a later run finds them
    other = settings.changed(data=(chats(tmp_path, "b", 20),))
    with pytest.raises(OutputError, match=r"kept has a capture of something else .*--cache-dir"):
        training_data(TARGET, other)


def test_a_requested_place_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = chats(tmp_path, "a", 20)
    assert training_data(TARGET, config(source, states="memory")).place == "memory"  # for any --cache-gb
    assert training_data(TARGET, config(source, states="online", cache_bits=8)).place == "online"
    monkeypatch.setattr(storage, "free_memory", lambda: 1000)
    monkeypatch.setattr(storage, "free_disk", lambda folder: 1000)
    with pytest.raises(ConfigError, match="kept in memory: .* of memory are free; .*--states disk"):
        training_data(TARGET, config(source, states="memory"))
    with pytest.raises(OutputError, match=r"are free at .*kept; free some space, .*--cache-bits 8"):
        training_data(TARGET, config(source, states="disk", cache_dir=str(tmp_path / "kept")))
    assert not (tmp_path / "kept").exists()


def test_contradictory_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = chats(tmp_path, "a", 10)
    with pytest.raises(ConfigError, match="has no weight"):
        training_data(TARGET, config(f"{source}=1", source))
    flags = ["--target", "checkpoints/target", "--data", source, f"{source}=0.5", "--output", str(tmp_path / "out")]
    assert main(flags) == 2
    assert "has no weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cache", "memory", "disk", "place", "reason"),
    [
        (1e9, 1e9, 1e9, "memory", "149.8 MB in 16 bits, captured once, kept in memory"),
        (1e9, 1e8, 1e9, "disk", "77.5 MB in 8 bits, captured once, kept on disk"),
        (9e7, 1e9, 1e9, "disk", "kept on disk"),
        (7e7, 1e9, 1e9, "online", "more than the cache of 70.0 MB, so captured for each batch"),
        (1e9, 1e8, 7e7, "online", "more than the 70.0 MB free on the disk"),
    ],
)
def test_where_states_go(
    cache: float, memory: float, disk: float, place: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = ShardMeta("t", 192, 50, (1, 2, 3), bits=8)
    monkeypatch.setattr(storage, "free_disk", lambda folder: disk / 0.95)
    settings = config("none").changed(cache_gb=cache / 1e9)
    choice = choose_states(settings, 97_200, meta, free=int(memory / 0.8))
    assert choice.place == place
    assert choice.text.startswith("hidden states of 97,200 tokens, 4 layers of 192 values: ")
    assert reason in choice.text
    in_16 = 97_200 * bytes_per_token(replace(meta, bits=16))
    assert choice.size == (in_16 if place == "memory" else 97_200 * bytes_per_token(meta))


@pytest.mark.parametrize(
    ("states", "most", "place"), [(None, 97_200, "memory"), (None, 97_199, "online"), ("memory", 0, "memory")]
)
def test_a_run_without_time_for_all_captures_only_what_it_learns(states: str | None, most: float, place: str) -> None:
    """A resumed run names the place."""
    meta = ShardMeta("t", 200, 50, (1, 2, 3))
    settings = config("none").changed(states=states, cache_gb=1.0)
    choice = choose_states(settings, 97_200, meta, free=10**9, most=most)
    assert choice.place == place
    assert ("more than there is time to learn" in choice.text) == (place == "online")
