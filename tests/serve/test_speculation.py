"""Speculation flags: their effects and their errors."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

import eagle_mlx as em
from eagle_mlx.cache.draft_window import DraftWindow
from eagle_mlx.catalog import embedded
from eagle_mlx.command import read
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.mtp import save_mtp
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, ThroughputPolicy
from eagle_mlx.policy.throughput import levels_for
from eagle_mlx.proposers.ngram import MIN_NGRAM
from eagle_mlx.serve.head_choice import quantize
from eagle_mlx.serve.speculation import AUTO, Speculation
from eagle_mlx.setting import find
from tests.eagle_mlx.heads import mtp
from tests.fakes import tiny_head, tiny_target, tiny_target_folder


def parse(line: str) -> Speculation:
    return read(Speculation, shlex.split(line), "test", "").for_target("T")[1]


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("--head none", "none"),
        ("--spec-decode none", "none"),
        ("--spec-decode ngram", "ngram"),
        ("--head H", "eagle"),
        ("--eagle-head-path H", "eagle"),
        ("--draft-model D", "draft"),
        ("--head H --spec-decode none", "none"),
        ("--head H --spec-decode mtp", "mtp"),
        ("--head H --num-draft-tokens 0", "none"),
    ],
)
def test_the_flags_decide_the_mode(line: str, mode: str) -> None:
    assert parse(line).resolved_mode() == mode


@pytest.mark.parametrize(
    ("line", "head"),
    [
        ("", AUTO),
        ("--head auto", AUTO),
        ("--spec-decode mtp", AUTO),
        ("--spec-decode eagle", AUTO),
        ("--head H", "H"),
        ("--head none", None),
        ("--draft-model D", None),
        ("--spec-decode ngram", None),
        ("--spec-decode none", None),
    ],
)
def test_a_head_is_searched_for_if_nothing_else_is_given(line: str, head: str | None) -> None:
    assert parse(line).head == head


def test_without_a_target_the_embedded_one_has_its_own_head() -> None:
    for line in ("", "--spec-decode eagle", "--head auto"):
        target, speculation = read(Speculation, shlex.split(line), "test", "").for_target(None)
        assert (target, speculation.head) == (embedded("target"), str(embedded("head")))
    assert Speculation(head="none").for_target(None)[1].resolved_mode() == "none"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (
            {"method": "eagle3", "model": "H", "num_speculative_tokens": 3},
            "--spec-decode eagle --head H --num-draft-tokens 3",
        ),
        ({"method": "eagle", "model": "H"}, "--spec-decode eagle --head H"),
        ({"method": "mtp", "model": "H"}, "--spec-decode mtp --head H"),
        ({"method": "draft_model", "model": "D"}, "--spec-decode draft --draft-model D"),
        (
            {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2},
            "--spec-decode ngram --ngram-max 5 --ngram-min 2",
        ),
    ],
)
def test_speculative_config_equals_the_separate_flags(config: dict[str, object], flags: str) -> None:
    assert parse(f"--speculative-config {shlex.quote(json.dumps(config))}") == parse(flags)


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ("--speculative-decoding ngram --spec-length 3", "--spec-decode ngram --num-speculative-tokens 3"),
        ("--draft-model-path D --num-draft-tokens 2", "--draft-model D --num-speculative-tokens 2"),
        ("--eagle-head-path H", "--head H"),
        ("--spec-decode-disable-batch-size 4", "--disable-by-batch-size 4"),
        ("--no-spec-decode-dynamic", "--no-dynamic-spec-decode"),
        ("--spec-decode-acceptance-threshold 0.4", "--acceptance-rate-threshold 0.4"),
        ("--speculative-decoding", ""),
        ("--speculative-decoding --head H", "--head H"),
        ("--draft-model D --speculative-decoding", "--draft-model D"),
        ("--speculative-decoding --head none", "--spec-decode ngram --head none"),
    ],
)
def test_flags_of_other_servers_are_known(other: str, own: str) -> None:
    assert parse(other) == parse(own)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--spec-decode draft", "--draft-model"),
        ("--head H --draft-model D", "cannot be combined"),
        ("--head auto --draft-model D", "cannot be combined"),
        ("--head auto --spec-decode ngram", "does not use --head"),
        ("--head H --spec-decode ngram", "does not use --head"),
        ("--draft-model D --spec-decode eagle", "does not use --draft-model"),
        ("--draft-model-quantize 4bit", "--draft-model"),
        ("--head-bits 4 --head none", "--head-bits needs a --head"),
        ("--head-bits 4 --draft-model D", "--head-bits needs a --head"),
        ("--head-bits 8 --spec-decode ngram", "--spec-decode ngram does not use --head-bits"),
        ("--draft-window 64 --head none", "--draft-window needs a --head"),
        ("--draft-window 64 --spec-decode ngram", "--spec-decode ngram does not use --draft-window"),
        ("--draft-window 64 --draft-sink 4 --draft-model D", "--draft-window, --draft-sink needs a --head"),
        ("--num-speculative-tokens -1", "between 0 and 20"),
        ("--speculative-config '{'", "not JSON"),
        ("--speculative-config '[]'", "must be an object"),
        ("""--speculative-config '{"method": "medusa"}'""", "got 'medusa'"),
        ("""--speculative-config '{"method": ["ngram"]}'""", r"got \['ngram'\]"),
        ("""--speculative-config '{"method": "ngram", "model": "x"}'""", "unknown key 'model'"),
        ("""--speculative-config '{"method": "eagle3", "num_speculative_tokens": "x"}'""", "must be a whole number"),
        (
            """--num-draft-tokens 2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
            "--num-speculative-tokens: set by both",
        ),
        ("--spec-policy throughput --no-adaptive-k", "only --spec-policy acceptance-ema uses --adaptive-k"),
        ("--spec-policy fixed --acceptance-rate-threshold 0.2", "--spec-policy acceptance-ema"),
        ("--draft-tree-nodes -1", "--draft-tree-nodes must be between 0 and 64"),
        ("--draft-tree-nodes 8 --spec-policy acceptance-ema", "only drafts chains"),
    ],
)
def test_contradictory_flags_are_refused(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(line)


def test_each_policy_gets_its_settings() -> None:
    assert isinstance(parse("").make_policy(), ThroughputPolicy)
    assert (parse("").depth, parse("--spec-policy fixed").depth, parse("--num-draft-tokens 0").depth) == (8, 4, 0)
    trees = parse("--head H --num-speculative-tokens 4 --draft-tree-nodes 16")
    assert trees.make_policy().wants_trees  # type: ignore[attr-defined]
    assert trees.max_depth == levels_for(16)
    assert "trees of up to 16" in str(trees)
    fixed = parse("--draft-tree-nodes 16 --spec-policy fixed --num-speculative-tokens 5")
    assert (fixed.make_policy(), fixed.max_depth) == (FixedPolicy(5, 16), 5)
    assert parse("--spec-policy fixed --num-draft-tokens 3").make_policy() == FixedPolicy(3)
    policy = parse(
        "--spec-policy acceptance-ema --no-adaptive-k --no-dynamic-spec-decode --disable-by-batch-size 8 "
        "--acceptance-rate-ema-alpha 0.2"
    ).make_policy()
    assert policy == AcceptancePolicy(4, alpha=0.2, threshold=0.0, disable_at_rows=8, adaptive=False)
    assert parse("--no-adaptive-k").make_policy() == AcceptancePolicy(4, adaptive=False), "its flags imply the policy"
    assert parse("--dynamic-spec-decode --disable-by-batch-size 0").make_policy() == AcceptancePolicy(4)
    with pytest.raises(ConfigError, match="alpha"):
        parse("--spec-policy acceptance-ema --acceptance-rate-ema-alpha 2").make_policy()


def test_a_start_says_that_n_grams_draft_no_trees() -> None:
    target, ngram = tiny_target(), Speculation(mode="ngram", tree_nodes=16, keep=False)
    engine = em.Engine(target, ngram.proposer(target), policy=ngram.make_policy())
    assert "trees" not in str(ngram)
    assert ngram.notes(engine) == ["no draft trees: n-grams draft chains"]
    head = replace(ngram, mode="eagle", head="H")
    assert "or trees of up to 16" in str(head)
    assert "trees" not in " ".join(head.notes(em.Engine(target, tiny_head(target), policy=head.make_policy())))


def test_the_help_names_the_fewest_tokens_that_match_with_a_model() -> None:
    assert f"{MIN_NGRAM} with a head or draft model" in find(Speculation, "ngram_min").help


def test_each_mode_loads_its_proposer(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("models")
    tiny_target_folder(root / "draft")
    target = em.load_target(root / "draft")
    save_eagle3(tiny_head(target), root / "head", target_name="tiny")
    assert Speculation().proposer(target) is None
    ngram = Speculation(mode="ngram", ngram_max=5, ngram_min=2, prompt_lookup=False).proposer(target)
    assert isinstance(ngram, em.NgramProposer)
    assert (ngram.max_ngram, ngram.min_ngram, ngram.prompt_lookup) == (5, 2, False)
    head = Speculation(head=str(root / "head"))
    assert isinstance(replace(head, ngrams=False).proposer(target), em.HeadProposer)
    assert isinstance(replace(head, policy="fixed").proposer(target), em.HeadProposer)
    hybrid = replace(head, ngram_max=6).proposer(target)
    assert isinstance(hybrid, em.HybridProposer)
    assert isinstance(hybrid.model, em.HeadProposer)
    assert (hybrid.name, hybrid.ngrams.max_ngram, hybrid.ngrams.min_ngram) == ("eagle", 6, 2)
    hybrid = Speculation(draft_model=str(root / "draft"), draft_bits="8bit").proposer(target)
    assert isinstance(hybrid, em.HybridProposer)
    draft = hybrid.model
    assert isinstance(draft, em.DraftModelProposer)
    draft.bind(target)
    with pytest.raises(ConfigError, match="needs a head"):
        Speculation(mode="eagle").proposer(target)
    with pytest.raises(EagleError, match="nowhere"):
        Speculation(draft_model="nowhere").proposer(target)


def test_layers_that_do_not_divide_into_groups_are_not_quantized() -> None:
    target = tiny_target(hidden=64)
    quantize(target.model, "4bit")
    kinds = {type(module) for _, module in target.model.named_modules()}
    assert nn.QuantizedLinear in kinds
    engine = em.Engine(tiny_target(hidden=64), em.DraftModelProposer(em.Target(target.model)))
    assert engine.generate([[1, 2, 3]], em.SamplingParams(max_tokens=4))[0].tokens
    odd = tiny_target(hidden=32)
    quantize(odd.model, "4bit")
    assert type(odd.model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_a_head_drafts_only_in_its_own_mode(tmp_path: Path) -> None:
    target = tiny_target()
    save_mtp(mtp(target), tmp_path / "mtp")
    save_eagle3(tiny_head(target), tmp_path / "eagle")
    for name, other in (("mtp", "eagle"), ("eagle", "mtp")):
        for mode in (None, name):
            proposer = Speculation(mode, str(tmp_path / name)).proposer(target)  # type: ignore[arg-type]
            assert proposer is not None
            assert proposer.name == name
        with pytest.raises(ConfigError, match=f"has the mode {name}"):
            Speculation(other, str(tmp_path / name)).proposer(target)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--spec-decode mtp needs a head"):
        Speculation("mtp").proposer(target)


def test_head_bits_apply_to_the_embedded_head_too() -> None:
    _, speculation = read(Speculation, ["--head-bits", "8"], "test", "").for_target(None)
    assert speculation.head is not None
    assert speculation.head_bits == 8


def test_a_draft_window_reaches_the_head() -> None:
    flags = ["--draft-window", "64", "--draft-sink", "2", "--no-ngram"]
    model, speculation = read(Speculation, flags, "test", "").for_target(None)
    proposer = speculation.proposer(em.load_target(model))
    assert isinstance(proposer, em.HeadProposer)
    assert proposer.draft_window == DraftWindow(64, 2)


def test_unknown_head_bits_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="^--head-bits must be one of 4, 8, 16, not '5'$"):
        parse("--head H --head-bits 5")


@pytest.mark.parametrize(
    ("bits", "reason"),
    [
        (4, "head precision: 4-bit weights in groups of 32"),
        (16, "head precision: weights in float32"),
        (None, "head precision: 8-bit weights in"),
    ],
)
def test_the_head_is_quantized_as_requested_and_reported(bits: Any, reason: str, tmp_path: Path) -> None:
    target = tiny_target()
    save_eagle3(tiny_head(target), tmp_path / "head")
    nn.quantize(target.model, 32, 8)
    speculation = Speculation(head=str(tmp_path / "head"), head_bits=bits)
    engine = em.Engine(target, speculation.proposer(target), policy=FixedPolicy(2))
    [line] = speculation.notes(engine)
    assert line.startswith(reason)
    assert Speculation().notes(em.Engine(target)) == []
