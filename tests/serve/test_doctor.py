"""eagle-doctor: finite figures for each size, advice that follows from them, and errors that name the remedy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eagle_mlx.catalog.models import described_target, published_model, published_models
from eagle_mlx.engine.groups import size_of
from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.machine import describe
from eagle_mlx.serve.doctor import measure
from eagle_mlx.serve.doctor.cli import main
from eagle_mlx.serve.doctor.measure import CHANCES, POSITIONS, SameBits, Steps, best_chain
from eagle_mlx.serve.doctor.report import Findings, MeasuredModel, advice, as_text
from eagle_mlx.target import Forward, Target, load_target, nbytes_of
from tests.architectures import tiny_model
from tests.eagle_mlx.worlds import verify_seconds
from tests.fakes import tiny_target, tiny_target_folder
from tests.full import in_full


def numbers(node: Any) -> list[float]:
    """Return all numbers in JSON."""
    if isinstance(node, dict | list):
        return [number for part in (node.values() if isinstance(node, dict) else node) for number in numbers(part)]
    return [node] if isinstance(node, int | float) else []


def test_each_size_has_a_finite_positive_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("REPEATS", 1), ("CONTEXT", 32)):
        monkeypatch.setattr(measure, name, few)
    assert main(["--shape", "tiny", "--bits", "16", "--json"]) == 0
    out, bars = capsys.readouterr()
    figures = json.loads(out)
    assert [int(size) for size in figures["steps"]["verify_ms"]] == sorted(POSITIONS)
    times = (*figures["steps"]["verify_ms"].values(), figures["steps"]["draft_ms"])
    assert all(positive > 0 for positive in (figures["prefill"], *times))
    assert all(map(math.isfinite, numbers(figures)))
    assert figures["model"]["bits"] is None
    assert [same["compared"] for same in figures["same_bits"]] == [64] * 4
    assert len(figures["chains"]) == 2
    assert figures["advice"]
    for part in ("build tiny", "verify and draft", "prefill", "same bits"):
        assert f"{part}: 100%" in bars


def test_a_real_model_is_measured_in_little_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then only a few sizes are."""
    folder, file = tiny_target_folder(tmp_path / "target"), tmp_path / "found.json"
    assert main(["--target", str(folder), "--seconds", "0.001", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert {"1", "4"} <= figures["steps"]["verify_ms"].keys() < set(map(str, POSITIONS))
    assert not figures["model"]["random_weights"]
    shown = capsys.readouterr().out
    assert f"model: {folder}, weights in float32" in shown
    model, target = figures["model"], load_target(str(folder))
    assert f"{model['weights_gb']:.2f} GB, caches of {model['cache_mb']:.1f} MB for a request of " in shown
    assert model["weights_gb"] == nbytes_of(target.model) / 1e9
    caches = size_of(target, None, None).nbytes(1, model["cache_tokens"])
    assert 1e6 * model["cache_mb"] == pytest.approx(caches)
    assert caches > 0
    assert "| 1 | " in shown
    assert f"- {figures['advice'][-1]}" in shown


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("--shape qwen-8b", "there is no shape qwen-8b: did you mean qwen3-8b? the shapes are gemma3-12b, "),
        ("--shape tiny --target model", "leave out --shape"),
        ("--shard tensor", "give --target"),
        ("--seconds 0", "--seconds must be above 0"),
    ],
)
def test_a_wrong_setting_names_the_remedy(line: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert remedy in capsys.readouterr().err


SHAPES = {model["model_type"]: name for name, model in published_models().items()}
"""One of each kind of model."""


@pytest.mark.parametrize("name", in_full(list(published_models()), list(SHAPES.values())))
def test_every_shape_can_be_built(name: str) -> None:
    target = described_target(name, published_model(name))
    assert target.forward(mx.zeros((1, 2), mx.int32)).logits.shape == (1, 2, target.vocab_size)  # nothing is computed


def test_a_hybrid_model_is_measured() -> None:
    target = Target(tiny_model("qwen3_5"), name="tiny")
    steps = measure.time_steps(target, random_head(target), 0.0)
    assert all(0 < ms < math.inf for ms in steps.verify_ms.values())
    assert measure.prefill_rate(target, 0.0) > 0
    assert [same.compared for same in measure.compare_bits(target, 16)] == [16] * 4


def test_the_same_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model whose logits only say what it has read."""
    target = tiny_target()
    one_hot = mx.eye(target.vocab_size)
    monkeypatch.setattr(target, "forward", lambda tokens, *_, **__: Forward(one_hot[tokens], ()))
    for same in measure.compare_bits(target, 64):
        assert same.equal == same.as_two == same.compared == 64
        assert same.other_argmax == same.largest_difference == 0


def steps_on(curve: str) -> Steps:
    ms = {count: 20 * verify_seconds(curve, count) for count in sorted(POSITIONS)}
    return Steps(512, ms, draft_ms=1.0, spread=1.0)


@pytest.mark.parametrize(
    ("curve", "depths"), [("M1 and M2", (0, 0, 0)), ("M3 Max", (0, 2, 3)), ("M5 Max", (0, 2, 5)), ("steps", (0, 2, 4))]
)
def test_the_best_chain_follows_from_the_measured_steps(curve: str, depths: tuple[int, ...]) -> None:
    chains = [best_chain(steps_on(curve), chance) for chance in (0.0, *CHANCES)]
    assert tuple(chain.depth for chain in chains) == depths
    assert all(chain.speed >= 1 for chain in chains)


def test_a_chain_is_no_longer_than_what_was_measured() -> None:
    """A slow machine measures few sizes; a verify of nine positions is not known to cost as much as one of eight."""
    steps = Steps(512, {1: 10.0, 2: 10.1, 4: 10.2, 8: 10.3}, 0.1, 1.0)
    assert best_chain(steps, 0.95).depth == 7


def findings(curve: str = "M5 Max", **changes: Any) -> Findings:
    model = MeasuredModel("qwen3-8b", True, 4, "bfloat16", 4.6)
    machine = replace(describe(), device="Apple M3 Max", blas="accelerate")
    same = [SameBits(width, 64, 64, 64, 0, 0.0) for width in (2, 4, 8, 16)]
    curve_at_load = [(1, 0.02), (4, 0.03)]
    steps = steps_on(curve)
    chains = [best_chain(steps, chance) for chance in CHANCES]
    result = Findings(machine, 40.0, 0, model, steps, 900.0, curve_at_load, same, chains)
    return replace(result, **changes)


def test_the_advice_follows_from_the_figures() -> None:
    good = findings()
    assert [text.partition(":")[0] for text in advice(good)] == [
        "Drafting pays",
        "Verifies and plain rounds give the same bits",
    ]
    assert "wired limit not changed" in as_text(good)
    differing = findings(same_bits=[SameBits(2, 64, 3, 64, 1, 0.1), SameBits(4, 64, 0, 64, 2, 0.1)])
    assert "differs at 3 of 128 positions (trained" in " ".join(advice(differing))
    assert "up to 4 positions (for one request: --num-speculative-tokens 3)" in " ".join(advice(differing))
    assert "take 1.10 times as long" in " ".join(advice(differing))
    useless = findings(same_bits=[SameBits(2, 64, 3, 64, 1, 0.1), SameBits(4, 64, 0, 63, 2, 0.1)])
    assert "--exact does not help" in " ".join(advice(useless))
    assert [text.partition(":")[0] for text in advice(findings("M1 and M2"))] == [
        "Even a good head gains little here",  # no advice to draft follows, although verifies cost more and more
        "Verifies and plain rounds give the same bits",
    ]
    stepped = [text.rpartition(" ")[2] for text in advice(findings("steps")) if "--spec-policy fixed" in text]
    assert stepped == ["4."]  # the step from 7 to 8 positions is beyond the best chain
    early = Steps(512, {1: 10.0, 2: 10.0, **dict.fromkeys(range(3, 10), 13.0)}, draft_ms=0.1, spread=1.0)
    over = findings(steps=early, chains=[best_chain(early, chance) for chance in CHANCES])
    assert all("--spec-policy fixed" not in text for text in advice(over))  # the best chains are beyond the step
    assert "A verify of 5 positions costs 1.28 times one of 4" in " ".join(advice(findings("M3 Max")))
    busy = findings(steps=replace(good.steps, spread=2.0))
    assert "Times vary by 2.0" in " ".join(advice(busy))
