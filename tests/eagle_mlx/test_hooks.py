"""Hooks touch one model only, for as long as a target of it is open."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

import eagle_mlx as em
from eagle_mlx import attention, hooks
from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.tree_support import why_no_trees
from eagle_mlx.errors import TargetError
from eagle_mlx.hooks import Hook, PlacesOneByOne, without_hooks
from tests.architectures import CONFIGS, tiny_model
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.full import in_turn

TOKENS = mx.array([[1, 5, 9, 2]])


def attributes_of_mlx_lm() -> dict[tuple[str, str], object]:
    """Return all attributes of the modules of mlx-lm and mlx.nn, and of their classes."""
    attributes: dict[tuple[str, str], object] = {}
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(("mlx_lm.", "mlx.nn.")):
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, ModuleType):  # others may import a part of mlx-lm meanwhile
                continue
            attributes[name, attribute] = value
            if isinstance(value, type) and value.__module__ == name:
                attributes |= {(f"{name}.{attribute}", inner): x for inner, x in vars(value).items()}
    return attributes


def attributes_of(model: nn.Module) -> dict[tuple[str, str], object]:
    """Return the classes, parameters and other attributes of a model's modules."""
    attributes: dict[tuple[str, str], object] = {}
    for name, module in model.named_modules():
        attributes[name, "__class__"] = type(module)
        attributes |= {(name, attribute): value for attribute, value in [*module.items(), *vars(module).items()]}
    return attributes


def differences(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[tuple[str, str]]:
    """Return the attributes that are another object now. gemma3n's layers replace weights by equal ones."""

    def same(old: Any, new: Any) -> bool:
        return old is new or (isinstance(old, mx.array) and isinstance(new, mx.array) and bool((old == new).all()))

    return [key for key in {**before, **after} if not same(before.get(key, before), after.get(key, after))]


def use(target: em.Target) -> None:
    """Read hidden states, logits, a chain with a rejected token and, if the model can, a tree."""
    with suppress(TargetError):  # two models have no hidden states that can be read
        target.forward(TOKENS, aux_layers=(0,))
    mx.eval(target.logits(target.embed(TOKENS)))
    with suppress(TargetError):  # some have no ragged caches
        cache = RaggedCache.of(target.model, 1)
        mx.eval(target.forward(TOKENS, cache, ends=[0]).logits)
        cache.advance(1)
        why_no_trees(target)


@pytest.mark.parametrize("name", in_turn(sorted(CONFIGS), of=12))
def test_mlx_lm_stays_as_it_is_and_a_model_becomes_what_it_was(name: str) -> None:
    model = tiny_model(name)
    before, model_before = attributes_of_mlx_lm(), attributes_of(model)
    target = em.Target(model)
    use(target)
    assert any(isinstance(module, Hook) for module in model.modules())
    assert not differences(before, attributes_of_mlx_lm())
    target.close()
    assert not differences(before, attributes_of_mlx_lm())
    assert not differences(model_before, attributes_of(model))


def test_a_model_loaded_meanwhile_decodes_with_mlx_lms_own_functions(tmp_path: Path) -> None:
    folder = str(tiny_target_folder(tmp_path / "target"))
    target = em.load_target(folder)
    em.Engine(target, em.HeadProposer(tiny_head(target))).generate([[3, 4, 5]], em.SamplingParams(max_tokens=4))
    model, tokenizer = mlx_lm.load(folder)[:2]
    files: set[str] = set()

    def notice(frame: FrameType, event: str, argument: object) -> None:
        files.add(frame.f_code.co_filename)

    sys.setprofile(notice)
    try:
        steps = list(mlx_lm.stream_generate(model, tokenizer, [3, 4, 5] * 40, max_tokens=4))
    finally:
        sys.setprofile(None)
    assert steps
    assert any(file.endswith("mlx_lm/models/base.py") for file in files)
    assert not [file for file in files if Path(file).is_relative_to(Path(hooks.__file__).parent)]


def test_hooked_modules_of_one_class_stay_of_one_class() -> None:
    first, second = tiny_target(), tiny_target()
    for target in (first, second):
        target.forward(TOKENS, aux_layers=(0, 1, 2))
        assert len({type(layer) for layer in target.model.layers[:3]}) == 1
        assert len({type(layer.self_attn) for layer in target.model.layers}) == 1
    assert type(first.model.layers[0]) is type(second.model.layers[0])
    assert type(first.model.layers[0]) is not type(tiny_model("qwen3").layers[0])


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), without_hooks]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "gpt2", "iquestloopcoder"])
@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle", "without_hooks"])
def test_a_copy_of_a_hooked_model_is_a_plain_model(make_copy: Callable[[Any], Any], name: str) -> None:
    plain = tiny_model(name)
    target = em.Target(tiny_model(name))
    target.model.update(plain.parameters())
    use(target)
    copied = make_copy(target.model)
    assert not [module for module in copied.modules() if isinstance(module, Hook)]
    assert [type(x) for x in copied.modules()] == [type(x) for x in plain.modules()]
    assert [vars(x).keys() for x in copied.modules()] == [vars(x).keys() for x in plain.modules()]
    assert mx.array_equal(copied(TOKENS), plain(TOKENS))


def test_a_copy_without_hooks_takes_no_memory_for_weights() -> None:
    target = tiny_target(hidden=256)
    mx.eval(target.model.parameters())
    before = mx.get_active_memory()
    copied = without_hooks(target.model)
    mx.eval(copied.parameters())
    assert mx.get_active_memory() - before < 1024
    mine, theirs = (dict(nn.utils.tree_flatten(model)) for model in (target.model, copied))
    assert all(mine[name] is theirs[name] for name in [*mine, *theirs])


def test_hooks_stay_until_the_last_target_of_a_model_is_closed_or_collected() -> None:
    first = tiny_target()
    model, second = first.model, em.Target(first.model)
    wanted = second.forward(TOKENS, aux_layers=(1,)).aux[0]
    first.close()
    first.close()
    assert mx.array_equal(second.forward(TOKENS, aux_layers=(1,)).aux[0], wanted)
    for use_closed in (lambda: first.forward(TOKENS), lambda: first.logits(wanted)):
        with pytest.raises(TargetError, match="is closed; load it again"):
            use_closed()
    del second
    gc.collect()
    assert not [module for module in model.modules() if isinstance(module, Hook)]


def test_hooks_stay_if_a_target_is_built_while_the_last_other_one_is_collected() -> None:
    model = tiny_model("qwen3")
    plain = attributes_of(model)
    first = em.Target(model)
    first.forward(TOKENS, aux_layers=(0,))
    hooked = [type(module) for module in model.modules()]
    built: list[em.Target] = []

    def build() -> None:
        built.append(em.Target(model))
        built[0].forward(TOKENS, aux_layers=(0,))

    weakref.finalize(first.hooks, build)  # runs once the hooks are dead, before they are removed
    first.close()
    assert built[0].forward(TOKENS).hidden is not None
    assert [type(module) for module in model.modules()] == hooked
    built[0].close()
    assert not differences(plain, attributes_of(model))


def test_a_model_stays_hooked_while_threads_build_and_drop_targets_of_it() -> None:
    model = tiny_model("qwen3")
    plain = attributes_of(model)

    def build_and_drop() -> bool:
        targets = (em.Target(model) for _ in range(12))
        return all(isinstance(target.model.model.norm, Hook) for target in targets)

    with ThreadPoolExecutor(4) as pool:
        assert all(future.result() for future in [pool.submit(build_and_drop) for _ in range(4)])
    assert not differences(plain, attributes_of(model))


def test_a_head_has_hooks_as_long_as_its_proposer_lives() -> None:
    target = tiny_target()
    head = tiny_head(target)
    proposer = em.HeadProposer(head)
    proposer.bind(target)
    assert any(isinstance(module, PlacesOneByOne) for module in head.modules())
    del proposer
    gc.collect()
    assert not [module for module in head.modules() if isinstance(module, Hook)]


def test_rope_is_known_by_its_arguments_not_by_its_name() -> None:
    class Turn(nn.RoPE):
        pass

    class RopeScale(nn.Module):
        def __call__(self, x: mx.array, scale: float, offset: int = 0) -> mx.array:
            return x * scale

    model = tiny_model("qwen3")
    for layer in model.layers:
        layer.self_attn.rope, layer.scale = Turn(16), RopeScale()
    target = em.Target(model)
    assert target.hooks is em.Target(model).hooks
    kinds = Counter(type(module).__name__ for module in model.modules() if isinstance(module, PlacesOneByOne))
    assert kinds == {"Turn": len(model.layers)}


@pytest.mark.parametrize("layers", [4, 8])
def test_hooks_add_one_call_for_each_attention_rope_and_final_norm(layers: int) -> None:
    target = tiny_target(layers=layers)
    cache, calls = RaggedCache.of(target.model, 1), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename in (hooks.__file__, attention.__file__)

    target.forward(TOKENS, cache)
    cache.advance(4)
    sys.setprofile(count)
    try:
        target.model(TOKENS[:, :1], cache=list(cache))
    finally:
        sys.setprofile(None)
    assert calls == layers * 3 + 1
