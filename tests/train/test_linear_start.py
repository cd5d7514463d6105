"""A new head starts as the best linear prediction of the target's next state."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.data_pipelines import capture
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.hidden_states import Example, from_16_bits
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import TrainData
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.kinds import kind_of, resolve
from eagle_mlx.train.kinds.block import unroll_blocks
from eagle_mlx.train.kinds.least_squares import Moments, best_map, bytes_of, error, factors
from eagle_mlx.train.run import new_head
from tests.fakes import tiny_target
from tests.full import diagonal, in_turn, some
from tests.train.test_step import conversations

LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def config_of(**more: Any) -> TrainConfig:
    return resolve(TrainConfig.of(**{"target": "tiny", "rows": 4, "length": 32, "lanes": 1, **more}), 32)


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Example]:
    return list(capture(target, LAYERS, conversations(target, 60)))


def started(target: Target, samples: list[Any], **more: Any) -> Any:
    layers = LAYERS if more.get("head", "peagle") == "peagle" else ()
    head = new_head(target, TrainData(InMemory(samples), layers, None, {}), config_of(**more))
    head.attach(target)
    return head


def right(head: Any, target: Target, samples: list[Example]) -> float:
    """Return how often the head's first draft is the target's likeliest token."""
    hits = count = 0
    for sample in samples:
        tokens, last = mx.array(sample.tokens)[None], from_16_bits(sample.states.last)[None].astype(mx.float32)
        aux = list(mx.split(from_16_bits(sample.states.features)[None].astype(mx.float32), 3, axis=-1))
        g = head.features(aux if isinstance(head, Eagle3Head) else [last])
        drafts = mx.argmax(head.logits(head(head.embed(tokens[:, 1:]), g[:, :-1])), axis=-1)
        best = mx.argmax(target.lm_head(target.norm(last)), axis=-1)[:, 1:]
        hits += int(mx.sum(drafts == best))
        count += best.size
    return hits / count


@pytest.mark.parametrize(
    "more",
    in_turn(
        [
            {},
            {"norm_before_residual": True},
            {"feature_norm": "all"},
            {"feature_norm": "none", "recycle": "output"},
            {"head": "eagle"},
            {"head": "mtp"},
            {"head": "peagle", "layers": 1},
            {"head": "peagle"},
        ]
    ),
)
def test_the_first_drafts_are_often_right_before_any_step(
    target: Target, samples: list[Example], more: dict[str, Any]
) -> None:
    learnt, fresh = samples[:50], samples[50:]
    at_random = right(started(target, learnt, start="random", **more), target, fresh)
    assert right(started(target, learnt, **more), target, fresh) > at_random + 0.2


def test_states_that_are_not_kept_are_read_again(target: Target, samples: list[Example]) -> None:
    bare = [Example(sample.tokens, sample.loss_mask) for sample in samples[:20]]
    kept, read = started(target, samples[:20]), started(target, bare)
    assert mx.allclose(kept.fc.weight, read.fc.weight, atol=0.02)  # saved ones are bfloat16


def test_fewer_tokens_are_read_if_states_must_be_computed(target: Target, samples: list[Example]) -> None:
    """It uses fewer tokens for each number of the prediction than with saved states."""

    class Counted(InMemory):
        taken = 0

        def __getitem__(self, index: int) -> Any:
            Counted.taken += 1
            return super().__getitem__(index)

    many = samples * 30

    def read(pieces: list[Any]) -> int:
        Counted.taken = 0
        new_head(target, TrainData(Counted(pieces), LAYERS, None, {}), config_of())
        return Counted.taken

    assert 0 < 3 * read([Example(sample.tokens, sample.loss_mask) for sample in many]) < read(many)


def test_states_that_are_not_finite_are_left_out(target: Target, samples: list[Example]) -> None:
    spoilt = replace(samples[3], states=replace(samples[3].states, last=samples[3].states.last | np.uint16(0x7FC0)))
    head = started(target, [*samples[:3], spoilt, *samples[4:20]])
    assert mx.all(mx.isfinite(head.fc.weight))
    assert not mx.array_equal(head.fc.weight, started(target, [], start="random").fc.weight)


def test_without_samples_a_head_stays_as_it_is(target: Target, samples: list[Example]) -> None:
    short = [s[:2] for s in samples[:3]]
    begun, untouched = started(target, short), started(target, short, start="random")
    assert mx.array_equal(begun.fc.weight, untouched.fc.weight)


@settings(max_examples=some(30))
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.1]))
def test_a_planted_map_is_found(seed: int, inputs: int, outputs: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    planted = rng.normal(size=(inputs, outputs))

    def piece() -> tuple[mx.array, mx.array]:
        x = rng.normal(size=(150, inputs))
        y = x @ planted + noise * rng.normal(size=(150, outputs))
        return mx.array(x.astype(np.float32)), mx.array(y.astype(np.float32))

    best = best_map(piece() for _ in range(20))
    assert best is not None
    assert np.abs(best[0] - planted).max() < 0.05
    x, y = piece()
    assert error(best[0], x, y) <= 1.2 * outputs * noise**2 + 0.05


def test_no_map_without_pieces() -> None:
    assert best_map([]) is None


def test_a_single_piece_gives_a_cautious_map() -> None:
    x = mx.random.normal((20, 4), key=mx.random.key(0))
    best = best_map([(x, x)])
    assert best is not None
    assert np.abs(best[0] - np.eye(4) / 1.1).max() < 0.1  # shrunk by the strongest ridge, a tenth


def test_solving_leaves_the_moments_as_they_were() -> None:
    x = mx.random.normal((50, 4), key=mx.random.key(0))
    moments = Moments(np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32))
    moments.add(x, x)
    before = moments.xx.copy()
    moments.solution(0.1)
    assert np.array_equal(moments.xx, before)


def test_the_memory_of_the_search_is_predicted() -> None:
    """Counts arrays only; LAPACK's own memory is small in comparison."""
    inputs, outputs = 1024, 256
    x, y = mx.zeros((512, inputs)), mx.zeros((512, outputs))
    x[mx.arange(512), mx.arange(512)] = 1.0
    mx.eval(x, y)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    best_map((x, y) for _ in range(40))
    taken = tracemalloc.get_traced_memory()[1] + mx.get_peak_memory() - before
    tracemalloc.stop()
    assert 0.3 * bytes_of(inputs, outputs) < taken < 1.1 * bytes_of(inputs, outputs)


@settings(max_examples=some(30))
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 8), st.integers(1, 10))
def test_factors_are_the_nearest_of_their_rank(seed: int, rows: int, columns: int, rank: int) -> None:
    matrix = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    left, right_side = factors(matrix, rank)
    assert left.shape == (rows, rank)
    assert right_side.shape == (rank, columns)
    lost = np.linalg.svd(matrix, compute_uv=False)[rank:]
    assert np.linalg.norm(matrix - left @ right_side) == pytest.approx(np.linalg.norm(lost), abs=1e-4)


def test_mask_tokens_begin_with_the_mean_of_what_the_head_reads(target: Target, samples: list[Example]) -> None:
    """One in ten samples judges and is not in the mean."""
    head = started(target, samples[:20], head="peagle")
    states = [from_16_bits(sample.states.features)[None].astype(mx.float32) for sample in samples[:20]]
    read = mx.concatenate([head.read(list(mx.split(aux, 3, axis=-1)))[0, :-1] for aux in states])
    off, spread = mx.abs(head.mask_hidden[0, 0] - read.mean(axis=0)), read.max(axis=0) - read.min(axis=0)
    assert mx.all(off < 0.05 * spread)


@pytest.mark.parametrize(("kind", "scale"), diagonal(["dspark", "dflash", "dflash2"], [1.0, 20.0]))
def test_slots_begin_with_the_newest_context_feature(kind: str, scale: float) -> None:
    """A slot's embedding stays in the residual, but it must not outweigh the feature if embeddings are large."""
    model: Any = tiny_target().model
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * scale
    target = Target(model, None, "tiny")
    samples = list(capture(target, LAYERS, conversations(target, 40)))
    head = new_head(target, TrainData(InMemory(samples), LAYERS, None, {}), config_of(head=kind))
    head.attach(target)
    cosines = []
    for sample in samples:
        tokens = mx.array(sample.tokens)[None]
        aux = list(mx.split(from_16_bits(sample.states.features)[None].astype(mx.float32), 3, axis=-1))
        g, anchors = head.features(aux), mx.arange(2, tokens.size)[None]
        drafts = unroll_blocks(head, (head.embed(tokens), g, mx.ones(tokens.shape, mx.int32), anchors), 2)
        for drafted in drafts:
            states = drafted / head.norm.weight
            cosines.append(mx.mean(states * g[:, 1:-1] / mx.sqrt(mx.mean(mx.square(states)) * mx.mean(mx.square(g)))))
    assert mx.mean(mx.stack(cosines)) > 0.7, "with 16 dimensions, older positions get some weight too"


@pytest.mark.parametrize("normed", [False, True])
def test_the_part_of_the_embedding_is_scaled_as_the_residual_is(target: Target, normed: bool) -> None:
    """A norm before the residual gives the states' part a mean square of 1, whatever the map gives."""
    head = started(target, [], norm_before_residual=normed)
    read, rng = head.fc.weight.shape[1], np.random.default_rng(1)
    x = rng.normal(size=(200, read + 32)).astype(np.float32)
    moments = Moments(np.zeros((read + 32, read + 32), np.float32), np.zeros((read + 32, 32), np.float32))
    moments.add(mx.array(x), mx.zeros((200, 32)))
    guess = rng.normal(size=(read + 32, 32)).astype(np.float32)
    attended = []
    for scale in (1.0, 4.0):
        kind_of(head).begin_as(head, np.concatenate([scale * guess[:read], guess[read:]]), moments)
        attended.append(np.array(head.midlayer.self_attn(mx.ones((1, 1, 64)), None, None)))
    np.testing.assert_allclose(attended[0], attended[1] * (4 if normed else 1), rtol=1e-4, atol=1e-5)
