"""P-EAGLE heads of every layout equal speculators (tests/golden/make_blocks.py), and need their mask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats.fields import LAYER_IDS
from eagle_mlx.heads import kind_of, load_head
from eagle_mlx.heads.eagle3 import PEagleHead, save_eagle3
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.base import Observation
from eagle_mlx.sampling_params import SamplingParams
from tests.eagle_mlx.heads import PARALLEL
from tests.eagle_mlx.test_blocks_golden import TARGET
from tests.fakes import tiny_target
from tests.golden import draws

GOLDEN = Path(__file__).parents[1] / "golden" / "peagle"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Change = Callable[[dict[str, Any], dict[str, mx.array]], None]


def load(folder: Path, name: str, change: Change | None = None) -> PEagleHead:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    config, tensors = golden["config"], {k: mx.array(draws.draw(k, shape)) for k, shape in golden["tensors"].items()}
    if change is not None:
        change(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    head = load_head(folder, TARGET)
    assert isinstance(head, PEagleHead)
    return head


def specforge(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    """Without a draft vocabulary, SpecForge writes the maps too."""
    layer = config.pop("transformer_layer_config")
    kept = {key: config[key] for key in ("mask_token_id", "draft_vocab_size", *NORMS, LAYER_IDS)}
    config.clear()
    config.update(layer | kept | {"architectures": ["PEagleDraftModel"]})
    tensors.setdefault("d2t", mx.zeros(config["draft_vocab_size"], mx.int64))
    tensors.setdefault("t2d", mx.ones(config["vocab_size"], mx.bool_))


def nemo(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    specforge(config, tensors)
    config.update(architectures=["LlamaEagle3DraftModel"], parallel_drafting=True, num_depths=8)
    for name in [name for name in tensors if name not in ("lm_head.weight", "d2t", "t2d")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def amazon(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    specforge(config, tensors)
    config.update(architectures=["LlamaForCausalLM"], ptd_token_id=config.pop("mask_token_id"))
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("whose", [None, specforge, nemo, amazon])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references(name: str, whose: Change | None, tmp_path: Path) -> None:
    head = load(tmp_path / "h", name, whose)
    features = head.features([mx.array(draws.block_context(k)[None]) for k in head.config.aux_layers])
    masks = head.features(mx.split(head.mask_hidden, len(head.aux_layers), axis=-1))
    rows = []
    for at in draws.ANCHORS:
        read = [*draws.BLOCK_TOKENS[1 : at + 2].tolist(), *[head.mask_token_id] * 3]
        g = mx.concatenate([features[:, : at + 1], *[masks] * 3], axis=1)
        rows.append(head.logits(head(head.embed(mx.array([read])), g, mask="causal")[0, -4:]))
    wanted = mx.load(str(GOLDEN / f"{name}.safetensors"))
    assert isinstance(wanted, dict)
    assert float(mx.abs(mx.stack(rows) - wanted["logits"]).max().item()) < 1e-4


@pytest.mark.parametrize("whose", [lambda *_: None, specforge])
@pytest.mark.parametrize(
    ("field", "tensor", "message"),
    [("mask_token_id", "", "lacks mask_token_id"), ("", "mask_hidden", "lacks mask_hidden")],
)
def test_files_without_a_mask_are_refused(whose: Change, field: str, tensor: str, message: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        whose(config, tensors)
        config.pop(field, None)
        tensors.pop(tensor, None)

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "h", "peagle", change)


def test_two_names_of_the_mask_must_agree(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        specforge(config, tensors)
        config["pard_token"] = 7

    with pytest.raises(CheckpointError, match="several mask tokens"):
        load(tmp_path / "h", "peagle", change)


@pytest.mark.parametrize("name", PARALLEL)
def test_the_portable_layout_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    target = tiny_target(vocab=64)
    head: Any = PARALLEL[name](target)
    save_eagle3(head, tmp_path / "a", dtype=mx.float32)
    again = load_head(tmp_path / "a", target)
    assert again.config == head.config
    assert mx.array_equal(again.mask_hidden, head.mask_hidden)
    assert kind_of(again).name == "peagle"


@pytest.mark.parametrize("name", PARALLEL)
def test_drafts_have_probabilities(name: str) -> None:
    target, params = tiny_target(vocab=64), SamplingParams(temperature=1.0)
    head: Any = PARALLEL[name](target)
    proposer = em.HeadProposer(head)
    proposer.bind(target)
    state, text = proposer.open([[5, 6, 7, 8]]), [5, 6, 7, 8]
    aux = target.forward(mx.array([text[:3]]), aux_layers=head.aux_layers).aux
    state.prefill(Observation([text[1:]], aux))
    batch = SamplingBatch.of([params], [0])
    draft = state.draft(Plan(4), batch, mx.array([4]))
    assert draft.tokens.shape == (1, 4)
    assert draft.probs is not None
    np.testing.assert_allclose(np.array(draft.probs)[0].sum(axis=-1), 1, rtol=1e-5)
