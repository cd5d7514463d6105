"""A toy kind of head, added by three registrations: trained, loaded, used, converted, published."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx import heads
from eagle_mlx.formats.tensors import HeadFolder, fill, save_head, weights_of
from eagle_mlx.heads import Format, HeadBase, HeadKind
from eagle_mlx.heads.base import Mask
from eagle_mlx.heads.layers import LayerShape, PlainLayer
from eagle_mlx.target import Target, load_target
from eagle_mlx.train import kinds
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.convert.cli import main as convert
from eagle_mlx.train.kind_settings import KIND_SETTINGS, KindSettings
from eagle_mlx.train.kinds.base import Kind, layer_shape
from eagle_mlx.train.publish.bundle import read_source

ROOT = Path(__file__).parents[2]
KIND_FOLDERS = r"^(eagle_mlx/heads/(eagle\.py|eagle3/|mtp/)|train/kinds/(eagle3|last_layer)\.py)"


class ToyConfig(LayerShape):
    """A layer's fields are all that it has."""


class ToyHead(HeadBase[ToyConfig]):
    """One layer over the sum of embedding and feature."""

    def __init__(self, config: ToyConfig, token_ids: mx.array | None = None):
        super().__init__(config, token_ids)
        self.fc = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layer = PlainLayer(config, 0)

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        return self.target.norm(aux[0])

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        return self.layer(self.fc(embeddings + g), mask, cache[0] if cache else None)

    def logits(self, h: mx.array) -> mx.array:
        return self.target.lm_head(h)


def save_toy(head: Any, folder: Path, **options: Any) -> None:
    save_head(folder, {"toy": dataclasses.asdict(head.config)}, weights_of(head), **options)


def load_toy(files: HeadFolder) -> ToyHead:
    head = ToyHead(ToyConfig(**{**files.config["toy"], "windows": ()}))
    fill(files.folder, head, files.tensors)
    return head


LAYOUT = Format("toy", "toys", (), lambda config, _: "toy" in config, load_toy, save_toy)
TOY = HeadKind("toy", "Toy", ToyHead, (LAYOUT,))


class ToyRecipe(Kind[ToyHead]):
    head_class = ToyHead

    def head_config(self, target: Target, config: TrainConfig, *_: Any) -> ToyConfig:
        return ToyConfig(**layer_shape(target, config))

    def guess(self, head: ToyHead, following: Any, aux: Any, last: Any) -> tuple[mx.array, mx.array]:
        states = head.target.norm(last.astype(head.target.dtype)).astype(mx.float32)
        return following + states[:, :-1], states[:, 1:]

    def begin_as(self, head: ToyHead, guess: Any, by: Any) -> None:
        head.fc.weight = mx.array(guess.T)


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the three registrations."""
    defaults = {"unroll": 2, "decay": 0.8, "loss": "soft", "feature_noise": 0.0}
    monkeypatch.setitem(KIND_SETTINGS, "toy", KindSettings("", defaults, {"layers": "it has one"}))
    monkeypatch.setitem(heads.KINDS, "toy", TOY)
    monkeypatch.setitem(kinds.KINDS, "toy", ToyRecipe())


@pytest.mark.usefixtures("_toy")
def test_a_toy_kind_is_trained_loaded_drafted_with_converted_and_published(
    target: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    line = ["--target", str(target), "--data", str(chats), "--output", str(out), "--head", "toy", "--max-steps", "2"]
    small = ["--length", "64", "--max-length", "64", "--rows", "2", "--eval-prompts", "2", "--eval-tokens", "6"]
    assert main([*line, *small, "--eval-depth", "2"]) == 0
    loaded = load_target(target)
    head = em.load_head(out / "best", loaded, check=False)
    assert isinstance(head, ToyHead)
    params = em.SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [list(range(1, 6)), list(range(3, 9))]
    drafted = em.Engine(loaded, proposer=em.HeadProposer(head), policy=em.FixedPolicy(3)).generate(prompts, params)
    plain = em.Engine(loaded).generate(prompts, params)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert convert([str(out / "best"), "--to", "toy", "--output", str(tmp_path / "again")]) == 0
    again = weights_of(em.load_head(tmp_path / "again"))  # type: ignore[arg-type]
    for name, value in weights_of(head).items():
        np.testing.assert_array_equal(np.array(value), np.array(again[name]))
    assert read_source(out).kind.title == "Toy"


def test_a_kind_is_named_in_its_own_folders_and_five_other_files() -> None:
    guide = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    section = guide.split("### A new kind of head")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(listed) <= 5
    assert all("mtp" in (ROOT / name).read_text(encoding="utf-8").lower() for name in listed)
    classes = re.compile(r"\b(Eagle3|Eagle|MTP)(Head|Config|Kind)\b")
    named = set()
    for top in ("eagle_mlx", "train", "serve", "data_pipelines"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not re.match(KIND_FOLDERS, name) and classes.search(path.read_text(encoding="utf-8")):
                named.add(name)
    assert named <= set(listed)
