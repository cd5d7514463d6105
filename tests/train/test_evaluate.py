from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagle_mlx.data_pipelines import capture
from eagle_mlx.heads import load_head
from eagle_mlx.request import Output
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import InMemory, TrainData
from eagle_mlx.train.evaluation import Evaluator, affordable, summarize
from eagle_mlx.train.kinds import resolve
from eagle_mlx.train.run import data_fingerprint, set_up, train
from tests.fakes import tiny_head, tiny_target
from tests.train.test_step import conversations


def output(tokens: list[int], rounds: int, drafted: list[int], accepted: list[int]) -> Output:
    return Output("", tokens, "length", 3, rounds, sum(drafted), sum(accepted), drafted, accepted)


def test_outputs_are_taken_together() -> None:
    outputs = [output(list(range(12)), 5, [4, 4], [4, 2]), output(list(range(8)), 5, [4, 2], [0, 1])]
    acceptance = summarize(outputs, 3, left_out=2)
    assert acceptance.acceptance_length == 2.0
    assert acceptance.acceptance_by_position == [0.5, 0.5, 0.0]
    assert (acceptance.prompts, acceptance.left_out, acceptance.emitted, acceptance.rounds) == (2, 2, 20, 10)
    assert summarize([], 2).acceptance_length == 0.0
    assert acceptance.interval == 0.0, "few prompts say little of others"
    assert acceptance.by_context == {}
    longer = replace(outputs[1], prompt_tokens=4000)
    assert summarize([longer, outputs[0]], 3).by_context == {"up to 512": 12 / 5, "up to 4,096": 8 / 5}
    assert summarize(3 * outputs, 3).interval == pytest.approx(
        2.571 * (6 / 5 * 3 * (2**2 + 2**2)) ** 0.5 / 30, rel=1e-3
    )


def test_measurements_are_compared_prompt_by_prompt() -> None:
    before = summarize([output([1] * 20, rounds, [], []) for rounds in (12, 9, 15, 10, 11, 8, 13)], 3)
    after = summarize([output([1] * 20, rounds, [], []) for rounds in (11, 8, 14, 9, 10, 7, 12)], 3)
    gain = after.gain_over(before)
    assert gain is not None
    assert gain.verdict == "better", "although the intervals of both overlap"
    assert before.acceptance_length + before.interval > after.acceptance_length - after.interval
    assert after.gain_over(summarize([], 3)) is None
    assert "by_prompt" not in after.figures


def test_a_head_is_measured_by_decoding() -> None:
    target = tiny_target()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, target.vocab_size, 6).tolist() for _ in range(6)]
    evaluator = Evaluator(target, prompts, depth=3, max_tokens=24, max_batch=4)
    first = evaluator.measure(tiny_head(target))
    assert first.prompts + first.left_out == 6
    assert first.prompts > 0
    assert first.emitted == 24 * first.prompts
    assert 1.0 <= first.acceptance_length <= 4.0
    assert len(first.acceptance_by_position) == 3
    assert first.interval < 1
    again = evaluator.measure(tiny_head(target))
    assert again.left_out == first.left_out
    assert again.acceptance_length == pytest.approx(first.acceptance_length, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "times", "expected"),
    [
        (10_000, 0, (100, 10)),
        (600, 0, (60, 10)),
        (200, 0, (50, 4)),
        (60, 0, (60, 1)),
        (20, 0, (20, 1)),
        (1, 0, (8, 1)),
        (600, 6, (100, 6)),
        (60, 6, (10, 6)),
    ],
)
def test_prompts_come_before_many_measurements(seconds: float, times: int, expected: tuple[int, int]) -> None:
    assert affordable(seconds, per_prompt=1.0, prompts=100, times=times) == expected


def test_some_texts_are_kept_for_people_to_read() -> None:
    target = tiny_target(tokenizer=True)
    assert target.tokenizer is not None
    prompts = [target.tokenizer.encode(f"def number_{i}(x):") for i in range(8)]
    evaluator = Evaluator(target, prompts, depth=2, max_tokens=16)
    acceptance = evaluator.measure(tiny_head(target))
    texts = evaluator.generations
    assert 0 < len(texts) <= 3
    assert len(texts) <= acceptance.prompts
    for text in texts:
        assert text["prompt"].startswith("def number_")
        assert text["text"]
        assert 1 <= text["rounds"] <= text["tokens"] <= 16
    bare = Evaluator(tiny_target(), [[1, 2, 3]], depth=2, max_tokens=8)
    bare.measure(tiny_head(tiny_target()))
    assert bare.generations == []


@pytest.mark.parametrize(("start", "lr", "improves"), [("linear", 0.1, False), ("random", 3e-3, True)])
def test_a_head_that_training_made_worse_is_not_the_best(tmp_path: Path, start: str, lr: float, improves: bool) -> None:
    """The start is then the best head: it is saved, and the report says so."""
    target, out = tiny_target(tokenizer=True), tmp_path / "out"
    prompts = [tokens[:6] for tokens, _ in conversations(target, 12)]
    learned = InMemory(list(capture(target, (0, 2, 3), conversations(target, 40))))
    data = TrainData(learned, (0, 2, 3), None, {})
    more = {"max_steps": 12, "eval_steps": 12, "eval_tokens": 16, "lr": lr, "start": start, "output": str(out)}
    given = TrainConfig.of(target="tiny", rows=4, length=32, unroll=2, lanes=1, dtype="float32", **more)
    with set_up(target, resolve(given, target.hidden_size), data_fingerprint(data)) as setup:
        report = train(setup, data, prompts)
    begun, last = (report["acceptance"][name]["acceptance_length"] for name in ("untrained", "last"))
    assert (last >= begun) == improves
    assert report["better_than_start"] == improves
    assert report["gain_over_start"]["gain"] == pytest.approx(report["acceptance_length"] / begun - 1)
    assert (report["best_step"], report["acceptance_length"]) == ((12, last) if improves else (0, begun))
    measured = Evaluator(target, prompts, max_tokens=16).measure(load_head(out / "best", target))
    assert measured.acceptance_length == pytest.approx(report["acceptance_length"])
