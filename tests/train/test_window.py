"""Training with a draft window: the draft steps are those of decoding with it, and heads remember it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.cache.draft_window import DraftWindow
from eagle_mlx.errors import CheckpointError
from eagle_mlx.heads import load_head
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3 import PEagleHead
from eagle_mlx.target import Target
from eagle_mlx.train.kinds import kind_of
from eagle_mlx.train.unroll import Inputs
from tests.eagle_mlx.heads import dflash, dflash2, dspark, eagle, eagle3, mtp, peagle
from tests.fakes import tiny_target

LENGTH, WINDOW, STEPS = 24, 5, 4
TARGET = tiny_target()
HEADS: dict[str, DraftHead] = {
    "eagle": eagle(TARGET),
    "eagle3": eagle3(TARGET),
    "eagle3, two layers": eagle3(TARGET, num_hidden_layers=2, norm_output=True),
    "mtp": mtp(TARGET),
    "peagle": peagle(TARGET),
    "dflash": dflash(TARGET),
    "dflash2": dflash2(TARGET),
    "dspark": dspark(TARGET),
    "dspark, gemma": dspark(TARGET, gemma=True, key_is_value=True, num_key_value_heads=1),
}


def decoded(head: Any, tokens: mx.array, g: mx.array, at: int) -> mx.array:
    """Return the outputs of the draft steps [STEPS, H] from a position, or of the slots after an anchor.

    tokens [1, L], g [1, L, H]: of one conversation.
    """
    window = DraftWindow(WINDOW)
    cache = window.cache(head.cache_layers, 1)
    entries = at if isinstance(head, BlockHead | PEagleHead) else at + 1
    if isinstance(head, BlockHead):
        head.extend(g[:, :entries], cache)
    else:
        h = head(head.embed(tokens[:, 1 : entries + 1]), g[:, :entries], cache)[:, -1:]
    cache.advance(entries)
    cache.drop([max(0, entries - window.entries)])
    cache.lengths.begin_draft()
    if isinstance(head, BlockHead):
        return head.block(tokens[:, at : at + 1], cache, head.config.drafts)[0, -head.config.drafts :]
    if isinstance(head, PEagleHead):
        return mx.concatenate([h, head.masks(1, STEPS - 1, cache)], axis=1)[0]
    outputs = [h]
    for step in range(1, STEPS):
        outputs.append(head(head.embed(tokens[:, at + 1 + step : at + 2 + step]), outputs[-1], cache))
        cache.lengths.advance(1)
    return mx.concatenate(outputs, axis=1)[0]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_draft_steps_are_those_of_decoding_with_the_window(name: str, recompute: bool) -> None:
    head: Any = HEADS[name]
    head.attach(TARGET)
    rng = np.random.default_rng(0)
    tokens = mx.array(rng.integers(0, TARGET.vocab_size, (2, LENGTH)))
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, 10:] = 2
    features = [mx.array(rng.normal(size=(2, LENGTH, TARGET.hidden_size)), mx.float32) for _ in head.aux_layers]
    g, positions = head.features(features), np.array([[3, 6, 15, 19], [1, 2, 11, 19]], np.int32)
    steps = head.config.drafts if isinstance(head, BlockHead) else STEPS
    inputs = Inputs(head.embed(tokens), g, mx.array(segments), mx.array(positions))
    outputs = {}
    for head.draft_window in (WINDOW, None):
        outputs[head.draft_window] = kind_of(head).unroll(head, inputs, steps, recompute)
    differs = False
    for row in range(2):
        for index, position in enumerate(positions[row].tolist()):
            begin = int(np.argmax(segments[row] == segments[row, position]))
            text = tokens[row : row + 1, begin:], g[row : row + 1, begin:]
            wanted = np.array(decoded(head, *text, position - begin))
            for step in range(steps):
                if index < np.ceil(kind_of(head).share(step) * positions.shape[1]):
                    rounding = 5e-5 * np.abs(wanted[step]).max()  # MLX's exp on a CPU is right to 2e-6
                    np.testing.assert_allclose(outputs[WINDOW][step][row, index], wanted[step], atol=rounding)
                    differs |= not np.allclose(outputs[None][step][row, index], wanted[step], atol=20 * rounding)
    assert differs  # without a window, some positions see more


def test_a_head_is_loaded_with_the_window_of_its_training(tmp_path: Path) -> None:
    target: Target = tiny_target()
    head = eagle3(target)
    kind_of(head).save(head, tmp_path / "head", "target", {"draft_window": 48})
    assert em.HeadProposer(load_head(tmp_path / "head", target)).draft_window == DraftWindow(48)
    file = tmp_path / "head" / "config.json"
    for wrong in (0, "48", 1.5):
        config = json.loads(file.read_text())
        config["eagle_mlx"]["draft_window"] = wrong
        file.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="eagle_mlx.draft_window"):
            load_head(tmp_path / "head", target)
