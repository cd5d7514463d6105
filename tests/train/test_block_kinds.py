"""Training of block drafters: anchors, one forward for all blocks, and losses, compared with drafting and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from eagle_mlx.cache import RaggedCache
from eagle_mlx.heads import load_head
from eagle_mlx.heads.block import BlockHead, DFlashHead, DSparkHead
from eagle_mlx.target import Target
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import Rows
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.kinds.block import spread_layers, unroll_blocks, with_latents
from eagle_mlx.train.kinds.eagle3 import share_of, unroll_masks
from eagle_mlx.train.step.inputs import ANCHORS, make_anchor_plan
from eagle_mlx.train.step.losses import confidence_loss
from eagle_mlx.train.unroll import Inputs
from tests.eagle_mlx.heads import GEMMA, PARALLEL, block_config, dflash2, likeliest
from tests.fakes import randomize, tiny_target

LENGTH = 24
SHAPES: dict[str, dict[str, Any]] = {
    "all slots": {},
    "causal, first slot drafts": {"causal": (True, True), "first_slot_drafts": True},
    "windows by slot": {"windows": (6, None), "causal": (True, False)},
    "windows shorter than the block": {"windows": (2, 3), "causal": (True, False)},
    "windows by anchor": {"windows": (4, 7), "window_start": "anchor", "first_slot_drafts": True},
    "convolutions": {"conv_kernel_size": 2, "conv_group_size": 8, "windows": (6, None)},
    "windows around slots": {"windows": (2, 6), "window_start": "around"},
    "gemma": {**GEMMA, "embedding_scale": 5.0, "first_slot_drafts": True},
}


def target() -> Target:
    return tiny_target()


def head_for(target: Target, **fields: Any) -> BlockHead:
    head = DSparkHead(block_config(target, **fields))
    randomize(head, 1, 0.2)
    head.attach(target)
    return head


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_are_those_of_drafting(shape: str, recompute: bool) -> None:
    """For each anchor, compare with a forward over its conversation's context alone."""
    model = target()
    head = head_for(model, **SHAPES[shape])
    rng = np.random.default_rng(0)
    tokens = mx.array(rng.integers(0, model.vocab_size, (2, LENGTH)))
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, 10:] = 2
    g = head.features([mx.array(rng.normal(size=(2, LENGTH, model.hidden_size)), mx.float32) for _ in head.aux_layers])
    anchors, drafts = np.array([[3, 9, 15, 20], [1, 2, 11, 23]], np.int32), head.config.drafts
    inputs = Inputs(head.embed(tokens), g, mx.array(segments), mx.array(anchors))
    unrolled = unroll_blocks(head, inputs, drafts, recompute)
    assert len(unrolled) == drafts
    first = 0 if head.config.first_slot_drafts else 1
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            begin = int(np.argmax(segments[row] == segments[row, anchor]))
            masks = mx.full((1, head.config.block_size - 1), head.config.mask_token_id, mx.int32)
            x = head.embed(mx.concatenate([tokens[row : row + 1, anchor : anchor + 1], masks], axis=1))
            wanted = np.array(head(x, g[row : row + 1, begin:anchor]))[0, first:]
            got = np.stack([np.array(step[row, index]) for step in unrolled])
            np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", PARALLEL)
def test_mask_tokens_are_those_of_drafting(name: str, recompute: bool) -> None:
    """For each anchor, compare with a draft after its conversation's tokens alone, if the anchor keeps the slot."""
    model = target()
    head: Any = PARALLEL[name](model)
    head.attach(model)
    rng = np.random.default_rng(0)
    tokens = mx.array(rng.integers(0, model.vocab_size, (2, LENGTH)))
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, 10:] = 2
    g = head.features([mx.array(rng.normal(size=(2, LENGTH, model.hidden_size)), mx.float32) for _ in head.aux_layers])
    anchors, drafts = np.array([[3, 9, 15, 20], [1, 2, 11, 23]], np.int32), 4
    inputs = Inputs(head.embed(tokens), g, mx.array(segments), mx.array(anchors))
    unrolled = unroll_masks(head, inputs, drafts, recompute)
    assert len(unrolled) == drafts
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            begin = int(np.argmax(segments[row] == segments[row, anchor]))
            cache = RaggedCache(head.cache_layers, 1)
            read = head.embed(tokens[row : row + 1, begin + 1 : anchor + 1])
            newest = head(read, g[row : row + 1, begin:anchor], cache)[:, -1:]
            cache.lengths.advance(anchor - begin)
            wanted = np.array(mx.concatenate([newest, head.masks(1, drafts - 1, cache)], axis=1))[0]
            for slot in range(drafts):
                if index < np.ceil(share_of(slot) * anchors.shape[1]):
                    np.testing.assert_allclose(unrolled[slot][row, index], wanted[slot], atol=2e-5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_head_reads_as_in_drafting(kind: str) -> None:
    model, rng = target(), np.random.default_rng(0)
    head = head_for(model, first_slot_drafts=True, markov_head=kind, markov_rank=8)
    tokens = mx.array(rng.integers(0, model.vocab_size, (2, LENGTH)))
    anchors = mx.array([[3, 9], [1, LENGTH - 5]])
    outputs = [mx.array(rng.normal(size=(2, 2, model.hidden_size)), mx.float32) for _ in range(head.config.drafts)]
    latents = with_latents(head, outputs, tokens, anchors)
    state = None
    for slot, (h, x) in enumerate(zip(outputs, latents, strict=True)):
        before, logits = mx.take_along_axis(tokens, anchors + slot, axis=1), head.logits(h)
        wanted, state = head.slot_logits(before, h, logits, state, None)
        got, latent, embedded = mx.split(x, [model.hidden_size, model.hidden_size + 8], axis=-1)
        np.testing.assert_array_equal(got, h)
        np.testing.assert_array_equal(embedded, head.markov_head.embedding(before))
        np.testing.assert_allclose(logits + head.markov_head.markov_w2(latent), wanted, atol=1e-5)


def test_the_selector_reads_as_in_drafting() -> None:
    model, rng = target(), np.random.default_rng(0)
    head = dflash2(model)
    head.attach(model)
    tokens = mx.array(rng.integers(0, model.vocab_size, (2, LENGTH)))
    anchors = mx.array([[3, 9], [1, LENGTH - 5]])
    outputs = [mx.array(rng.normal(size=(2, 2, model.hidden_size)), mx.float32) for _ in range(head.config.drafts)]
    for slot, (h, x) in enumerate(zip(outputs, with_latents(head, outputs, tokens, anchors), strict=True)):
        before, logits = mx.take_along_axis(tokens, anchors + slot, axis=1), head.logits(h)
        candidates = likeliest(head, logits)
        assert candidates is not None
        wanted, _ = head.slot_logits(before, h, logits, None, candidates)
        got, latent = mx.split(x, [model.hidden_size], axis=-1)
        np.testing.assert_array_equal(got, h)
        scores = head.candidate_selector.scores(latent, logits, candidates)
        np.testing.assert_allclose(scores, mx.take_along_axis(wanted, candidates, axis=-1), atol=1e-5)


def test_a_new_dflash2_head_drafts_as_a_dflash_head() -> None:
    """Its convolutions return their input, and its selector changes no candidate's logit."""
    model, kind = target(), KINDS["dflash2"]
    config = resolve(TrainConfig().changed(head="dflash2", unroll=3), model.hidden_size)
    head: Any = kind.new(model, config, None, kind.aux_layers(model, config))
    assert head.config.selector_rank == 8
    for layer in head.layers:  # with layers that add something
        rng = np.random.default_rng(1)
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight = mx.array(rng.normal(0, 0.2, part.weight.shape), mx.float32)
    plain = DFlashHead(replace(head.config, conv_kernel_size=0, selector_rank=0, selector_top_k=0))
    own = dict(tree_flatten(plain.parameters()))
    plain.load_weights([(name, value) for name, value in tree_flatten(head.parameters()) if name in own])
    plain.attach(model)
    rng = np.random.default_rng(0)
    x, g = (mx.array(rng.normal(size=(2, n, model.hidden_size)), mx.float32) for n in (4, 9))
    h = head(x, g)
    np.testing.assert_allclose(h, plain(x, g), atol=1e-6)
    logits = head.logits(h)
    candidates = mx.argsort(-logits, axis=-1)[..., :16]
    final, _ = head.slot_logits(mx.array([[1] * 4, [2] * 4]), h, logits, None, candidates)
    same = mx.take_along_axis(final, candidates, axis=-1) == mx.take_along_axis(logits, candidates, axis=-1)
    assert bool(mx.all(same))


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Rows with several conversations, padding, and any loss mask."""
    width, length = draw(st.integers(1, 3)), draw(st.integers(3, 16))
    segments = np.zeros((width, length), np.int32)
    for row in range(width):
        at = segment = 0
        while at < length and (size := draw(st.integers(0, length - at))):
            segment += 1
            segments[row, at : at + size] = segment
            at += size
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=width * length, max_size=width * length)), np.uint8)
    return Rows(np.zeros((width, length), np.int32), mask.reshape(width, length), segments, None)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 5))
@example(Rows(np.zeros((1, 3), np.int32), np.ones((1, 3), np.uint8), np.ones((1, 3), np.int32), None), 5)
def test_anchors_and_labels_are_those_of_the_definition(rows: Rows, steps: int) -> None:
    plan = make_anchor_plan(rows, steps, seed=0, step=3)
    width, length = rows.segments.shape
    wanted = set()
    for row in range(width):
        for anchor in range(1, length):
            if rows.segments[row, anchor] == 0 or rows.segments[row, anchor - 1] != rows.segments[row, anchor]:
                continue
            for slot in range(steps):
                reads = range(anchor, anchor + slot + 2)
                if reads[-1] >= length or any(
                    rows.segments[row, at] != rows.segments[row, anchor] or not rows.loss_mask[row, at] for at in reads
                ):
                    break
                wanted.add((row, anchor, slot))
    anchored = set()
    for slot, label in zip(*np.nonzero(plan.valid), strict=True):
        row, place = divmod(int(plan.select[slot, label]), plan.positions.shape[1])
        anchor = int(plan.positions[row, place])
        assert divmod(int(plan.labels[label]), length) == (row, anchor + slot)
        anchored.add((row, anchor, int(slot)))
    assert anchored == wanted


def test_long_conversations_have_a_limited_number_of_anchors_whoever_reads_them() -> None:
    shape = (3, 2 * ANCHORS)
    rows = Rows(np.zeros(shape, np.int32), np.ones(shape, np.uint8), np.ones(shape, np.int32), None)
    plan = make_anchor_plan(rows, 2, seed=0, step=0)
    assert plan.counts.tolist() == [3 * ANCHORS] * 2 or plan.counts[0] == 3 * ANCHORS
    last = make_anchor_plan(rows.split(3)[2], 2, seed=0, step=0)
    assert last.positions[0].tolist() == plan.positions[2].tolist()
    assert make_anchor_plan(rows, 2, seed=0, step=1).positions.tolist() != plan.positions.tolist()


def test_fewer_anchors_keep_each_later_slot_and_come_first() -> None:
    shape = (2, 60)
    mask = np.ones(shape, np.uint8)
    mask[1, 20:40] = 0
    rows = Rows(np.zeros(shape, np.int32), mask, np.ones(shape, np.int32), None)
    plan = make_anchor_plan(rows, 4, seed=0, step=0, share=share_of)
    kept = np.zeros((4, *plan.positions.shape), bool)
    for slot, label in zip(*np.nonzero(plan.valid), strict=True):
        kept[slot].reshape(-1)[plan.select[slot, label]] = True
    anchors = kept[0].sum(axis=1)
    for slot in range(1, 4):
        assert not np.any(kept[slot] & ~kept[slot - 1])
        assert (kept[slot].sum(axis=1) <= share_of(slot) * anchors).all()
        assert (kept[slot].sum(axis=1) > share_of(slot) * anchors - 2).all()
        assert not kept[slot][:, int(np.ceil(share_of(slot) * plan.positions.shape[1])) :].any()


def test_the_confidence_is_best_at_the_probability_of_acceptance() -> None:
    sure, accepted = mx.linspace(-4, 4, 161), 0.7
    losses = confidence_loss(sure, mx.full(sure.shape, accepted))
    assert abs(float(mx.sigmoid(sure[mx.argmin(losses)])) - accepted) < 0.02
    p = np.array(mx.sigmoid(sure))
    np.testing.assert_allclose(losses, -accepted * np.log(p) - (1 - accepted) * np.log(1 - p), atol=1e-5)


@pytest.mark.parametrize("name", ["dflash", "dspark", "peagle"])
def test_a_head_with_a_draft_vocabulary_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, kind = target(), KINDS[name]
    config = TrainConfig().changed(head=name, unroll=3, layers=2, draft_vocab=40)
    kept = np.sort(np.random.default_rng(0).choice(model.vocab_size, 40, replace=False))
    head = kind.new(model, config, kept, kind.aux_layers(model, config))
    kind.save(head, tmp_path / "head", "tiny", {}, mx.float32)
    loaded = load_head(tmp_path / "head", model)
    assert loaded.token_ids is not None
    assert np.array(loaded.token_ids).tolist() == kept.tolist()
    h = mx.array(np.random.default_rng(0).normal(size=(1, 2, model.hidden_size)), mx.float32)
    head.attach(model)
    np.testing.assert_allclose(loaded.logits(h), head.logits(h), atol=1e-5)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_by_default_slots_have_the_weights_of_the_published_losses(name: str) -> None:
    decay = resolve(TrainConfig().changed(head=name), 32).optimization.decay
    np.testing.assert_allclose([decay**slot for slot in range(7)], np.exp(-np.arange(7) / 4))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "peagle"])
def test_a_new_head_has_the_blocks_and_layers_that_the_settings_ask_for(name: str, layers: int) -> None:
    model, kind = target(), KINDS[name]
    config = resolve(TrainConfig().changed(head=name, unroll=3, layers=layers), model.hidden_size)
    head = kind.new(model, config, None, kind.aux_layers(model, config))
    assert name == "peagle" or head.config.drafts == 3
    assert head.config.num_hidden_layers == layers


def test_a_new_dspark_head_has_the_parts_of_published_ones() -> None:
    """Other loaders expect its Markov head, a quarter as wide as the tiny target, and its confidence head."""
    model, kind = target(), KINDS["dspark"]
    config = resolve(TrainConfig().changed(head="dspark"), model.hidden_size)
    head = kind.new(model, config, None, kind.aux_layers(model, config))
    made = (head.config.first_slot_drafts, head.config.markov_head, head.config.markov_rank)
    assert made == (True, "vanilla", model.hidden_size // 4)
    assert {"markov_head", "confidence_head"} <= dict(head.children()).keys()


def test_a_block_head_reads_layers_from_the_second_to_the_third_from_the_end() -> None:
    """The layers of z-lab's DFlash heads for 36 layers, and what is left of them in smaller models."""
    assert [spread_layers(count) for count in (36, 5, 3)] == [(1, 9, 17, 25, 33), (1, 2), (1,)]
