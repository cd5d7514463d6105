"""Heads of several layers, which start as the target's last layers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from eagle_mlx.data_pipelines import capture
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.hidden_states import Example
from eagle_mlx.ranks import ProcessGroup
from eagle_mlx.ranks.commands import LeadingTarget
from eagle_mlx.target import Target
from eagle_mlx.train.data import Batches, TrainData
from eagle_mlx.train.data.examples import InMemory
from eagle_mlx.train.kinds import kind_of
from eagle_mlx.train.kinds.eagle3 import aux_layers_for
from eagle_mlx.train.run import new_head
from eagle_mlx.train.step import Stepper
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal, in_full
from tests.train.test_linear_start import config_of, right
from tests.train.test_step import conversations


def samples_of(target: Target, layers: tuple[int, ...], count: int = 60) -> list[Example]:
    return list(capture(target, layers, conversations(target, count)))


def head_of(target: Target, samples: list[Example], read: tuple[int, ...], **more: Any) -> Eagle3Head:
    head: Any = new_head(target, TrainData(InMemory(samples), read, None, {}), config_of(**more))
    head.attach(target)
    return head


def turning_neighbours() -> Target:
    """Return a target whose RoPE rotates neighboring channels, as in llama.cpp's files."""
    target = tiny_target(architecture="llama")
    for layer in target.layers:
        layer.self_attn.rope.traditional = True
    return target


def scaled(**scaling: Any) -> Target:
    """Return a target with scaled RoPE, by default as in Llama 3.1."""
    scaling = scaling or {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    target = tiny_target(architecture="llama")
    args: Any = target.model.args
    args.rope_scaling = scaling
    for layer in target.layers:
        layer.self_attn.rope = initialize_rope(16, args.rope_theta, False, scaling, args.max_position_embeddings)
    return target


def quantized() -> Target:
    target = tiny_target(architecture="llama")
    nn.quantize(target.model, group_size=32, bits=8)
    return Target(target.model, name="quantised")


TARGETS = {
    "qwen3": tiny_target,
    "qwen2": lambda: tiny_target(architecture="qwen2"),
    "llama": lambda: tiny_target(architecture="llama"),
    "llama, neighbours turned": turning_neighbours,
    "llama, scaled RoPE": scaled,
    "llama, 8 bits": quantized,
}


@pytest.mark.parametrize(("name", "layers"), diagonal(TARGETS, [2, 3]))
def test_layers_after_the_first_are_copies_of_the_targets_last_layers(name: str, layers: int) -> None:
    target = TARGETS[name]()
    aux_layers = aux_layers_for(target.num_layers, layers)
    head = head_of(target, samples_of(target, aux_layers), aux_layers, layers=layers)
    tokens = mx.array(np.random.default_rng(0).integers(0, 100, (2, 9)), mx.int32)
    x, wanted = target.forward(tokens, aux_layers=(target.num_layers - layers, target.num_layers - 1)).aux
    for layer in head.layers:
        x = layer(x, "causal", None)
    assert len(head.layers) == layers - 1
    assert mx.allclose(x, wanted, rtol=1e-3, atol=1e-3 * float(mx.max(mx.abs(wanted))))


def test_one_layer_reads_the_layers_of_published_heads_and_more_continue_from_theirs() -> None:
    """EAGLE-3 heads for 36 layers read 2, 18 and 33, counted from 1."""
    assert aux_layers_for(36, 1) == (1, 17, 32)
    assert aux_layers_for(36, 2) == (1, 17, 34)


@pytest.mark.parametrize("name", in_full(["qwen3", "llama, neighbours turned"], ["qwen3"]))
def test_the_copies_improve_the_linear_start(name: str) -> None:
    target = TARGETS[name]()
    samples = samples_of(target, (0, 1, 2), 120)
    head = head_of(target, samples, (0, 1, 2), layers=3)
    begun = right(head, target, samples)
    for layer in head.layers:  # they then add nothing
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    assert begun > 1.1 * right(head, target, samples)


def test_it_learns_and_is_written_and_read(tmp_path: Any) -> None:
    target = tiny_target()
    samples = samples_of(target, (0, 1, 2))
    config = config_of(layers=3, unroll=2, lr=1e-3)
    head = head_of(target, samples, (0, 1, 2), layers=3)
    stepper = Stepper(head, target, config)
    batches = Batches(InMemory(samples), 4, 32, 0)
    losses = [result.loss for result in map(partial(stepper, factor=1.0), islice(batches.epoch(0), 12)) if result]
    assert losses[-1] < losses[0]
    kind_of(head).save(head, tmp_path, "tiny", {}, mx.float32)
    again: Any = load_head(tmp_path, target)
    again.attach(target)
    assert again.config == head.config
    assert right(again, target, samples) == right(head, target, samples)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layers": 3, "aux_layers": [0, 2]}, "layer 1, which the head does not read; add it to --aux-layers"),
        ({"layers": 5}, "--layers 5: must be at most 4"),
        ({"layers": 2, "norm_before_residual": True}, "--norm-before-residual cannot be used with --layers 2"),
        ({"layers": 2, "heads": 2}, "layer 3 of tiny has weights that a head cannot have: self_attn.o_proj"),
    ],
)
def test_impossible_shapes_are_refused(more: dict[str, Any], message: str) -> None:
    target = tiny_target()
    config = config_of(**more)
    with pytest.raises(ConfigError, match=message):
        kind_of(tiny_head(target)).check(target, config)


def test_layers_that_are_divided_among_machines_are_not_copied() -> None:
    """Each machine has a part of every layer, and a head needs all of it."""
    target = tiny_target()
    channel: Any = SimpleNamespace(world=ProcessGroup(0, 2))
    leading = LeadingTarget.of(target, channel)
    for layers, wrong in ((1, None), (2, "--layers 2: with --shard, a machine has only a part of each layer")):
        with pytest.raises(ConfigError, match=wrong) if wrong else nullcontext():
            kind_of(tiny_head(target)).check(leading, config_of(layers=layers))


def test_layers_with_unknown_rope_are_not_copied() -> None:
    target = scaled(rope_type="longrope", factor=8.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    for layers, wrong in ((1, None), (2, "RoPE scaling of type longrope is not supported.*use --layers 1")):
        with pytest.raises(ConfigError, match=wrong) if wrong else nullcontext():
            kind_of(tiny_head(target)).check(target, config_of(layers=layers))


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_other_kinds_have_one_layer(kind: str) -> None:
    with pytest.raises(ConfigError, match="--layers cannot be used with --head"):
        config_of(head=kind, layers=2)


def test_shards_without_the_layer_in_front_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(ConfigError, match="layer 1, which the head does not read"):
        kind_of(tiny_head(target)).new(target, config_of(layers=3), None, (0, 2))
