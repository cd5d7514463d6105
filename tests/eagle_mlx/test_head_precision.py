"""Heads compute in the target's type, whatever type their files have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

import eagle_mlx as em
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.precision import quantize
from eagle_mlx.proposers.head import HeadState
from eagle_mlx.target import Target
from eagle_mlx.train.evaluation import Evaluator
from tests.eagle_mlx.heads import ALL, BLOCKS, KINDS, eagle, eagle3
from tests.fakes import tiny_target
from tests.full import in_full

PROMPTS = [[1, 2, 3, 4, 5], [9, 4], [7, 7, 8, 50, 3, 2, 1, 60, 33]]
TYPES = {"bf16": (mx.bfloat16, mx.float16), "fp16": (mx.float16, mx.bfloat16), "4-bit": (mx.bfloat16, mx.float32)}
"""The target's type, and the type of the head's file."""


def target_of(kind: str) -> Target:
    model = tiny_target(vocab=64).model
    model.set_dtype(TYPES[kind][0])
    if kind == "4-bit":
        nn.quantize(model, 32, 4)
    return Target(model)


TARGETS = {kind: target_of(kind) for kind in TYPES}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> dict[str, set[mx.Dtype]]:
    """Record the types that heads compute in while a test decodes."""
    seen: dict[str, set[mx.Dtype]] = {}

    def note(part: str, arrays: list[mx.array]) -> None:
        seen.setdefault(part, set()).update(x.dtype for x in arrays if mx.issubdtype(x.dtype, mx.floating))

    def watch(owner: type, part: str) -> None:
        compute = getattr(owner, part)

        def watched(self: Any, *args: Any, **options: Any) -> Any:
            out = compute(self, *args, **options)
            note(part, [out])
            return out

        monkeypatch.setattr(owner, part, watched)

    for owner in {type(make(TARGETS["bf16"])) for make in ALL.values()}:
        for part in ("features", "__call__", "logits"):
            watch(owner, part)
    draft = HeadState.draft

    def drafted(self: HeadState, *args: Any) -> Any:
        out = draft(self, *args)
        note("keys and values", list(self.cache.state))
        note("hidden", [self.hidden])
        return out

    monkeypatch.setattr(HeadState, "draft", drafted)
    return seen


def floating(weights: Mapping[str, mx.array]) -> set[mx.Dtype]:
    return {x.dtype for x in weights.values() if mx.issubdtype(x.dtype, mx.floating)}


EVERY = [(kind, of) for kind in ALL for of in TYPES]
IN_TURNS = [(kind, list(TYPES)[number % len(TYPES)]) for number, kind in enumerate(ALL)]


@pytest.mark.parametrize(("kind", "of"), in_full(EVERY, IN_TURNS[::3]))
def test_a_head_computes_in_the_type_of_its_target(kind: str, of: str, computed: dict[str, set[mx.Dtype]]) -> None:
    target, (wanted, written) = TARGETS[of], TYPES[of]
    head: Any = ALL[kind](target)
    head.set_dtype(written)
    if any(isinstance(module, SwitchLinear) for module in head.modules()):
        quantize(head, 8, 32)  # MLX's CPU has no products of 16-bit experts
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(3), max_batch=2)
    outputs = engine.generate(PROMPTS, em.SamplingParams(max_tokens=6, ignore_eos=True))
    assert sum(output.drafted for output in outputs) > 10
    if kind in BLOCKS:
        assert not computed.pop("hidden")  # the newest token
    assert set(computed) >= {"features", "__call__", "logits", "keys and values"}
    assert all(types == {wanted} for types in computed.values()), f"{written} in {wanted}"


def test_trees_compute_in_the_type_of_the_target(computed: dict[str, set[mx.Dtype]]) -> None:
    head = eagle3(TARGETS["bf16"], draft_vocab=40)
    engine = em.Engine(TARGETS["bf16"], em.HeadProposer(head), policy=em.FixedPolicy(3, nodes=6))
    assert engine.generate(PROMPTS, em.SamplingParams(max_tokens=6))[0].drafted
    assert set().union(*computed.values()) == {mx.bfloat16}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_decoding_leaves_the_head_that_is_trained_as_it_is() -> None:
    """An evaluation during training casts a copy, and the master weights stay float32."""
    head = eagle3(TARGETS["4-bit"], draft_vocab=40)
    head.attach(TARGETS["4-bit"])
    before = weights_of(head)
    evaluator = Evaluator(TARGETS["4-bit"], PROMPTS, depth=3, max_tokens=8)
    assert evaluator.measure(head).rounds
    after = weights_of(head)
    assert floating(after) == {mx.float32}
    assert all(after[name] is value for name, value in before.items())
    assert head.token_ids is not None
    assert head.token_ids.dtype == mx.int32


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_written_after_decoding_is_what_was_read(tmp_path: Path) -> None:
    target, made = TARGETS["bf16"], eagle3(TARGETS["bf16"], draft_vocab=40)
    save_eagle3(made, tmp_path / "head", dtype=mx.float16)
    head: Any = load_head(tmp_path / "head", target)
    em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(3)).generate(
        PROMPTS, em.SamplingParams(max_tokens=6)
    )
    assert floating(weights_of(head)) == {mx.float16}
    save_eagle3(head, tmp_path / "again", dtype=mx.float16)
    first, again = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("head", "again"))
    assert {name: x.dtype for name, x in first.items()} == {name: x.dtype for name, x in again.items()}
    assert all(mx.array_equal(first[name], again[name]) for name in first)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_head_of_the_right_type_is_not_copied() -> None:
    head: Any = eagle(TARGETS["bf16"])
    head.set_dtype(mx.bfloat16)
    proposer = em.HeadProposer(head)
    proposer.bind(TARGETS["bf16"])
    assert proposer.head is head


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_chooses_experts_keeps_its_type() -> None:
    """With rounding it would choose other experts."""
    proposer = em.HeadProposer(KINDS["mtp of deepseek"](TARGETS["bf16"]))
    proposer.bind(TARGETS["bf16"])
    types = {name: x.dtype for name, x in tree_flatten(proposer.head.parameters())}  # type: ignore[attr-defined]
    assert types.pop("block.mlp.gate.e_score_correction_bias") == mx.float32
    assert set(types.values()) == {mx.bfloat16}
