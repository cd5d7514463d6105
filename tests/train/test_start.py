"""Training from an existing head: the same head, or an error that names what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from eagle_mlx.data_pipelines import ShardCapture
from eagle_mlx.errors import CheckpointError, ConfigError, ShardError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import kind_of as known_kind
from eagle_mlx.heads import load_head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.heads.mtp.formats import quantized
from eagle_mlx.heads.precision import quantize
from eagle_mlx.hidden_states import widened
from eagle_mlx.target import Target, load_target
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data.sources import training_data
from eagle_mlx.train.evaluation import Evaluator
from eagle_mlx.train.kinds import KINDS, kind_of, merged, resolve
from eagle_mlx.train.kinds.base import projection
from eagle_mlx.train.run.start import existing_head, with_vocabulary
from eagle_mlx.train.step.step import Stepper
from tests.eagle_mlx.heads import GEMMA, dflash, dflash2, dspark, eagle, eagle3, mtp, peagle
from tests.fakes import tiny_target
from tests.full import in_full, in_turn
from tests.train.test_kinds import batch

TARGET = tiny_target()
SHAPES: dict[str, Any] = {
    "eagle3": lambda: eagle3(TARGET, draft_vocab=48, norm_before_residual=True),
    "eagle3.1": lambda: eagle3(TARGET, fc_norm=True, norm_output=True),
    "eagle3, two layers": lambda: eagle3(TARGET, num_hidden_layers=2, qk_norm=True, windows=(None, 6)),
    "eagle3, narrow": lambda: eagle3(TARGET, hidden_size=24, own_embedding=True),
    "eagle": lambda: eagle(TARGET, bias=False),
    "eagle, own embedding": lambda: eagle(TARGET, own_embedding=True),
    "p-eagle": lambda: peagle(TARGET, own_embedding=True, fc_norm=True, norm_output=True),
    "mtp": lambda: mtp(TARGET, norm_output=True),
    "mtp, own ends": lambda: mtp(TARGET, own_embedding=True, own_lm_head=True),
    "dspark, as DeepSpec": lambda: dspark(TARGET, num_hidden_layers=3, own_embedding=True, own_lm_head=True),
    "dspark, for Gemma": lambda: dspark(TARGET, **GEMMA, embedding_scale=TARGET.hidden_size**0.5),
    "dspark, as speculators": lambda: dspark(TARGET, markov_head="rnn", draft_vocab_size=40, own_lm_head=True),
    "dspark, as SpecForge": lambda: dspark(TARGET, windows=(6, None), causal=(True, False)),
    "dspark, without a Markov head": lambda: dspark(TARGET, markov_head=None, own_embedding=True, own_lm_head=True),
    "dspark, confidence alone": lambda: dspark(TARGET, markov_head="gated", confidence_with_markov=False),
    "dflash": lambda: dflash(TARGET, windows=(6, None), causal=(True, False)),
    "dflash, as Muse Glimmer": lambda: dflash(
        TARGET, windows=(3, None), window_start="around", embedding_scale=1.0, logit_softcap=0.0
    ),
    "dflash2": lambda: dflash2(TARGET),
}
"""Heads of which some can be written in one layout only."""


def written(head: Any, folder: Path) -> Path:
    head.attach(TARGET)
    kind_of(head).save(head, folder, "tiny", {})
    return folder


def config_of(head: str, folder: Path, **more: Any) -> TrainConfig:
    values = {"target": "tiny", "rows": 4, "length": 32, "lanes": 1, "unroll": 2, "lr": 1e-2}
    return resolve(TrainConfig.of(**{**values, "head": head, "init_from": str(folder), **more}), TARGET.hidden_size)


@pytest.mark.parametrize(
    ("name", "rank"), in_full([*product(SHAPES, (0, 3))], [(name, 3 * (at % 2)) for at, name in enumerate(SHAPES)])
)
def test_it_begins_as_the_head_that_was_saved_and_learns(tmp_path: Path, name: str, rank: int) -> None:
    """With a rank, only additions to inner matrices are learned, and the head that is written contains them."""
    folder = written(SHAPES[name](), tmp_path / "head")
    saved: Any = load_head(folder, TARGET)
    config = config_of(kind_of(saved).name, folder, lora_rank=rank, optimizer="muon" if rank else "adamw")
    short = config.changed(dtype="bfloat16")
    for key, value in weights_of(merged(existing_head(TARGET, short))).items():  # type: ignore[arg-type]
        assert value.dtype == (mx.bfloat16 if rank else mx.float32), key
    head: Any = existing_head(TARGET, config)
    assert head.config == saved.config
    for key, value in weights_of(merged(head)).items():
        assert value.dtype == mx.float32
        np.testing.assert_array_equal(value, weights_of(saved)[key])
    prompts = [list(range(i, i + 5)) for i in range(in_full(8, 4))]
    evaluator = Evaluator(TARGET, prompts, depth=3, max_tokens=in_full(12, 8))
    assert evaluator.measure(head).acceptance_length == evaluator.measure(saved).acceptance_length
    rows = batch(TARGET, head)
    stepper = Stepper(head, TARGET, config)
    results = [stepper(rows, 1.0) for _ in range(in_full(8, 4))]
    assert results[0] is not None
    assert results[-1] is not None
    assert results[-1].loss < results[0].loss
    fixed = (
        ("embed_tokens", "lm_head", "markov_head", "confidence_head", "candidate_selector")
        if rank
        else ("embed_tokens",)
    )
    for key, value in weights_of(merged(head)).items():
        changed = not np.array_equal(value, weights_of(saved)[key])
        assert changed == (not key.startswith(fixed) and (value.ndim == 2 or not rank)), key
    kind_of(head).save(merged(head), tmp_path / "learned", "tiny", {}, mx.float32)
    loaded: Any = load_head(tmp_path / "learned", TARGET)
    assert loaded.config == saved.config
    rng = np.random.default_rng(0)
    e, g = (mx.array(rng.normal(size=(1, 5, head.hidden_size)), mx.float32) for _ in range(2))
    np.testing.assert_allclose(
        loaded.logits(loaded(e, g, None, "causal")), head.logits(head(e, g, None, "causal")), rtol=1e-5, atol=1e-5
    )


def test_additions_of_low_rank_begin_with_mlx_lms_bound(tmp_path: Path) -> None:
    """Uniform within 1 / sqrt(n) for a matrix with n inputs, times zeros."""
    folder = written(SHAPES["eagle3.1"](), tmp_path / "head")
    head: Any = existing_head(TARGET, config_of("eagle3", folder, lora_rank=8))
    additions = [part for _, part in head.named_modules() if isinstance(part, LoRALinear)]
    assert len({part.lora_a.shape[0] for part in additions}) > 1
    for part in additions:
        bound = part.lora_a.shape[0] ** -0.5
        assert 0.9 * bound < float(mx.max(mx.abs(part.lora_a))) <= bound
        assert not mx.any(part.lora_b)


def test_a_quantized_head_is_trained_dequantized(tmp_path: Path) -> None:
    folder = written(quantized(mtp(TARGET), bits=4, group_size=32), tmp_path / "head")
    saved = load_head(folder, TARGET)
    head: Any = existing_head(TARGET, config_of("mtp", folder))
    assert isinstance(saved, MTPHead)
    assert saved.config.quantization is not None
    assert head.config.quantization is None
    rng = np.random.default_rng(0)
    e, g = (mx.array(rng.normal(size=(1, 5, 32)), mx.float32) for _ in range(2))
    np.testing.assert_allclose(
        head.logits(head(e, g, None, "causal")), saved.logits(saved(e, g, None, "causal")), atol=1e-3
    )


@pytest.mark.parametrize("name", in_turn(SHAPES))
def test_quantized_heads_of_every_kind_are_trained_dequantized(tmp_path: Path, name: str) -> None:
    made = SHAPES[name]()
    quantize(made, 8, 32)
    saved: Any = load_head(written(made, tmp_path / "head"), TARGET)
    head: Any = existing_head(TARGET, config_of(kind_of(saved).name, tmp_path / "head"))
    assert head.config == replace(saved.config, quantization=None)
    assert {x.dtype for x in weights_of(head).values()} == {mx.float32}
    rng = np.random.default_rng(0)
    e, g = (mx.array(rng.normal(size=(1, 5, head.hidden_size)), mx.float32) for _ in range(2))
    np.testing.assert_allclose(head(e, g, None, "causal"), saved(e, g, None, "causal"), atol=1e-3)
    assert head.token_ids is None or mx.array_equal(head.token_ids, saved.token_ids)


@pytest.mark.parametrize(
    ("made", "head", "more", "message"),
    [
        ("eagle3", "mtp", {}, "is an EAGLE-3 head; continue it with --head eagle3"),
        ("mtp", "eagle3", {}, "is an MTP head; continue it with --head mtp"),
        (
            "eagle3",
            "eagle3",
            {"draft_vocab": 64, "lora_rank": 2},
            "--draft-vocab is 64, .* has 48; leave --draft-vocab",
        ),
        ("eagle3, two layers", "eagle3", {"layers": 1}, "--layers is 1, but .* has 2"),
        ("eagle3", "eagle3", {"layers": 2, "lora_rank": 2}, "--layers is 2, but .* has 1"),
        ("dspark, as SpecForge", "dspark", {"layers": 5}, "--layers is 5, but"),
        ("dflash", "dflash", {"draft_vocab": 64}, "--draft-vocab is 64, but .* has 128"),
        ("eagle3", "eagle3", {"aux_layers": [0, 1, 2]}, "--aux-layers is 0 1 2, but .* has 0 2 3"),
        ("eagle3", "eagle3", {"heads": 2}, "--heads is 2, but .* has 4"),
        ("eagle3.1", "eagle3", {"norm_before_residual": True}, "--norm-before-residual is True"),
        ("eagle", "eagle", {"intermediate_size": 7}, "--intermediate-size is 7, but .* has 48"),
    ],
)
def test_contradictions_are_refused_by_name(
    tmp_path: Path, made: str, head: str, more: dict[str, Any], message: str
) -> None:
    folder = written(SHAPES[made](), tmp_path / "head")
    with pytest.raises(ConfigError, match=message):
        existing_head(TARGET, config_of(head, folder, **more))


def test_matching_settings_are_accepted(tmp_path: Path) -> None:
    folder = written(SHAPES["eagle3"](), tmp_path / "head")
    more = {"draft_vocab": 48, "aux_layers": [0, 2, 3], "heads": 4, "norm_before_residual": True}
    assert existing_head(TARGET, config_of("eagle3", folder, **more)) is not None
    assert existing_head(TARGET, config_of("eagle3", folder)) is not None
    whole = written(SHAPES["eagle3.1"](), tmp_path / "whole")
    assert existing_head(TARGET, config_of("eagle3", whole, draft_vocab=32000)) is not None
    assert existing_head(TARGET, config_of("eagle3", folder, draft_vocab=64)) is not None, "the data chooses them"
    assert existing_head(TARGET, resolve(TrainConfig(), TARGET.hidden_size)) is None


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "eagle3, two layers", "p-eagle"])
def test_a_head_with_more_layers_drafts_as_before_and_learns(tmp_path: Path, name: str) -> None:
    folder = written(SHAPES[name](), tmp_path / "head")
    saved: Any = load_head(folder, TARGET)
    head: Any = existing_head(TARGET, config_of(kind_of(saved).name, folder, layers=3, dtype="float32"))
    assert head.config.num_hidden_layers == 3
    rng = np.random.default_rng(0)
    e, g = (mx.array(rng.normal(size=(1, 5, head.hidden_size)), mx.float32) for _ in range(2))
    np.testing.assert_allclose(head(e, g, None, "causal"), saved(e, g, None, "causal"), atol=1e-5)
    before = {key: np.array(value) for key, value in weights_of(head).items()}
    stepper, rows = Stepper(head, TARGET, config_of(kind_of(saved).name, folder, layers=3)), batch(TARGET, head)
    results = [stepper(rows, 1.0) for _ in range(4)]
    assert results[0] is not None
    assert results[-1] is not None
    assert results[-1].loss < results[0].loss
    assert not np.array_equal(before["layers.1.mlp.up_proj.weight"], weights_of(head)["layers.1.mlp.up_proj.weight"])
    kind_of(head).save(head, tmp_path / "grown", "tiny", {}, mx.float32)
    assert load_head(tmp_path / "grown", TARGET).config == head.config


KEPT = {"some": np.array([0, 3, *range(20, 90), 127]), "all": None}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "dspark, as speculators", "dspark, as DeepSpec"])
def test_a_head_with_another_draft_vocabulary_drafts_known_tokens_as_before(name: str, kept: str) -> None:
    head, config = SHAPES[name](), config_of("eagle3", Path("any"))
    head.attach(TARGET)
    changed: Any = with_vocabulary(head, TARGET, KEPT[kept], config)
    every = np.arange(TARGET.vocab_size)
    before = every if head.token_ids is None else np.array(head.token_ids)
    after = every if KEPT[kept] is None else KEPT[kept]
    assert changed.config == replace(head.config, draft_vocab_size=len(after))
    np.testing.assert_array_equal(every if changed.token_ids is None else changed.token_ids, after)
    _, old, new = np.intersect1d(before, after, return_indices=True)
    was, now = weights_of(head), weights_of(changed)
    assert was.keys() == now.keys()
    for key, value in was.items():
        by_token = key in ("lm_head.weight", "markov_head.markov_w2.weight")
        np.testing.assert_array_equal(
            *(np.array(value)[old], np.array(now[key])[new]) if by_token else (value, now[key])
        )
    trained = dict(tree_flatten(changed.trainable_parameters()))
    assert changed is head or "embed_tokens.weight" not in trained


def test_rows_of_new_tokens_are_like_those_of_the_tokens_that_a_head_has() -> None:
    """Here they are the target's own rows, changed alike: shifted, so that an added row of the target's would win."""
    ids, rng = np.arange(0, 100), np.random.default_rng(0)
    head = eagle3(TARGET, draft_vocab=100)
    head.attach(TARGET)
    shift, mix = rng.normal(size=32), np.eye(32) + 0.1 * rng.normal(size=(32, 32))
    whole = np.array(projection(TARGET)) @ mix + shift
    head.lm_head.weight = mx.array(whole[ids], mx.float32)
    head = type(head)(head.config, mx.array(ids, mx.int32)).update(head.parameters())
    head.attach(TARGET)
    changed: Any = with_vocabulary(head, TARGET, None, config_of("eagle3", Path("any")))
    np.testing.assert_allclose(changed.lm_head.weight, whole, atol=0.02 * np.abs(whole).max())


def test_the_data_choose_the_draft_vocabulary_of_an_existing_head(tmp_path: Path) -> None:
    ShardCapture(TARGET, (0, 2, 3), [(list(range(100, 120)), [1] * 20)] * 3).write(tmp_path / "shards")
    folder, more = written(SHAPES["eagle3"](), tmp_path / "head"), {"shards": str(tmp_path / "shards")}

    def kept(**own: Any) -> list[int]:
        config = config_of("eagle3", folder, **more, **own)
        mask = training_data(TARGET, config, head=existing_head(TARGET, config)).kept
        assert mask is not None
        return mask.tolist()  # type: ignore[no-any-return]

    had = existing_head(TARGET, config_of("eagle3", folder)).token_ids.tolist()  # type: ignore[union-attr]
    assert kept() == had
    assert kept(lora_rank=2, draft_vocab=48) == had
    assert set(kept(draft_vocab=48)) == {*range(100, 120), *[i for i in had if i not in range(100, 120)][:28]}


def test_a_head_that_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    head = dspark(TARGET, markov_head="rnn", first_slot_drafts=False)
    layout = next(layout for layout in known_kind(head).formats if layout.name == "speculators")
    layout.save(head, tmp_path / "head", target_name="tiny", extra={}, dtype=mx.float32)
    with pytest.raises(ConfigError, match="recurrent Markov head .* cannot be trained"):
        existing_head(TARGET, config_of("dspark", tmp_path / "head", lora_rank=2))


def test_a_folder_without_a_head(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        existing_head(TARGET, config_of("eagle3", tmp_path / "head"))


CONVERSATION = (list(range(20)), [0] * 5 + [1] * 15)


def test_shards_must_hold_the_layers_that_the_head_reads(tmp_path: Path) -> None:
    ShardCapture(TARGET, (0, 1), [CONVERSATION] * 3).write(tmp_path / "shards")
    more = {"shards": str(tmp_path / "shards")}
    config = config_of("eagle3", written(SHAPES["eagle3"](), tmp_path / "head"), **more)
    with pytest.raises(ShardError, match=r"has the layers 0, 1, 3, but the head reads 0, 2, 3; .*0,2,3"):
        training_data(TARGET, config, head=existing_head(TARGET, config))
    for kind in ("eagle", "mtp"):
        config = config_of(kind, written(SHAPES[kind](), tmp_path / kind), **more)
        data = training_data(TARGET, config, head=existing_head(TARGET, config))
        assert data.aux_layers == ()
        assert data.samples[0].states.features.shape == (20, 0)  # type: ignore[union-attr]


def test_a_head_reads_any_layers_of_several_folders_of_shards(tmp_path: Path) -> None:
    """The last layer is one of them: its states are kept for the labels. The head's order of layers is used."""
    for name, layers, count in (("a", (0, 1), 2), ("b", (1, 2, 0), 1)):
        ShardCapture(TARGET, layers, [CONVERSATION] * count).write(tmp_path / name)
    shards = [str(tmp_path / name) for name in "ab"]
    given = TrainConfig.of(shards=tuple(shards), aux_layers=(3, 0, 1))
    data = training_data(TARGET, resolve(given, TARGET.hidden_size))
    assert data.aux_layers == (3, 0, 1)
    assert data.report["tokens"] == 60
    states = mx.concatenate(TARGET.forward(mx.array([CONVERSATION[0]]), aux_layers=data.aux_layers).aux, axis=-1)[0]
    for index in range(3):
        sample = data.samples[index]
        assert sample.states is not None
        np.testing.assert_allclose(widened(sample.states.features), np.array(states), rtol=1e-2, atol=2e-3)
        np.testing.assert_array_equal(sample.states.last, sample.states.features[:, : TARGET.hidden_size])
    held = training_data(TARGET, resolve(TrainConfig.of(shards=tuple(shards)), TARGET.hidden_size))
    assert held.aux_layers == (0, 1)
    with pytest.raises(ShardError, match=r"a has the layers 0, 1, 3, but the head reads 2"):
        training_data(TARGET, resolve(TrainConfig.of(shards=tuple(shards), aux_layers=(2,)), TARGET.hidden_size))


def run(target: Path, chats: Path, output: Path, *more: str) -> int:
    sizes = ("--length", "64", "--max-length", "64", "--rows", "2", "--max-steps", "2", "--log-steps", "1")
    judged = ("--eval-prompts", "2", "--eval-tokens", "6", "--eval-depth", "2", "--lr", "1e-3")
    return main(["--target", str(target), "--data", str(chats), "--output", str(output), *sizes, *judged, *more])


@pytest.mark.parametrize("kind", in_full(list(KINDS), ["mtp"]))
def test_a_run_continues_the_head_of_another(target: Path, chats: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    shape, more = (("--draft-vocab", "512"), ("--draft-vocab", "600")) if kind == "eagle3" else ((), ())
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(target, chats, first, "--head", kind, "--window", "24", *shape) == 0
    report = json.loads((first / "report.json").read_text())
    assert (report["kind"], report["started_from"], report["config"]["head"]) == (kind, None, kind)
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if row["kind"] == "train"]
    assert all(("feature_loss_by_step" in row) == (kind == "eagle") for row in logged)
    assert len(logged[0]["loss_by_step"]) == report["config"]["unroll"]
    assert run(target, chats, second, "--head", kind, "--init-from", str(first / "last"), *more) == 0
    went_on = json.loads((second / "report.json").read_text())
    assert went_on["started_from"] == "last"
    before, began = report["acceptance"]["last"], went_on["acceptance"]["untrained"]
    assert report["config"]["window"] == 24
    assert began["acceptance_length"] == pytest.approx(before["acceptance_length"], rel=0.2)
    assert f"{first / 'last'} had" in capsys.readouterr().out
    model: Target = load_target(str(target))
    for name in ("best", "last"):
        continued = load_head(second / name, model)
        assert kind_of(continued).name == kind
        assert continued.draft_window == 24
    if kind == "eagle3":
        assert load_head(second / "last", model).token_ids.shape == (600,)  # type: ignore[union-attr]


def test_the_wrong_kind_is_an_error_message(target: Path, chats: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(target, chats, tmp_path / "out", "--head", "mtp", "--draft-vocab", "512") == 2
    assert "error: --draft-vocab cannot be used with --head mtp" in capsys.readouterr().err
    assert run(target, chats, tmp_path / "out", "--lora-rank", "4") == 2
    assert "--lora-rank adapts an existing head: name it with --adapt" in capsys.readouterr().err
    assert run(target, chats, tmp_path / "out", "--init-from", str(tmp_path / "none")) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
