"""Tiny models with random weights, real in everything but their size."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.utils import linear_to_lora_layers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_mlx.cache import full
from eagle_mlx.data_pipelines.jsonl import PartialFile
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.engine import Engine
from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers, save_eagle3
from eagle_mlx.plan import CONFIDENCE_LAG, Abilities, Plan
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState
from eagle_mlx.request import Output
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from tests.full import FULL

EMBEDDED_TARGET = Path(__file__).parent.parent / "checkpoints" / "target"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tiny_config(layers: int = 4, hidden: int = 32, vocab: int = 128) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def randomize(module: nn.Module, seed: int, spread: float) -> None:
    """Draw weights far enough from zero that outputs depend on every part of the input."""
    rng = np.random.default_rng(seed)

    def draw(name: str, w: mx.array) -> mx.array:
        scale = w.ndim < 2 and not name.endswith("bias")
        return mx.array(rng.uniform(0.5, 1.5, w.shape) if scale else rng.normal(0.0, spread, w.shape), mx.float32)

    module.update(tree_map_with_path(draw, module.parameters()))
    mx.eval(module.parameters())


@cache
def _embedded_tokenizer() -> TokenizerWrapper:
    return load_tokenizer(EMBEDDED_TARGET)


def copied(tokenizer: Any) -> Any:
    """Copy a tokenizer, but share its vocabulary, which takes nearly all the time."""
    shared = getattr(tokenizer, "backend_tokenizer", None)
    return deepcopy(tokenizer, {id(shared): shared})


def embedded_tokenizer() -> TokenizerWrapper:
    """Return a copy that the test may change. If it adds tokens, it must copy the vocabulary, too."""
    assert _embedded_tokenizer().backend_tokenizer.get_vocab_size() == 4096, "a test has added tokens for all"
    return cast(TokenizerWrapper, copied(_embedded_tokenizer()))


@cache
def _plain_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)  # type: ignore[no-untyped-call]


def plain_tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    """Return a copy of transformers' own tokenizer, which mlx-lm wraps, with this chat template."""
    tokenizer = deepcopy(_plain_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def tiny_target(
    seed: int = 0,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 128,
    tokenizer: bool = False,
    architecture: str = "qwen3",
) -> Target:
    """Return a random model in memory, with the embedded tokenizer if asked for (then `vocab` is its 4,096)."""
    vocab = 4096 if tokenizer else vocab
    file = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = file.Model(file.ModelArgs.from_dict({**tiny_config(layers, hidden, vocab), "model_type": architecture}))
    randomize(model, seed, 0.2)
    return Target(model, embedded_tokenizer() if tokenizer else None, name="tiny")


def tiny_head(target: Target, seed: int = 0, draft_vocab: int | None = None) -> Eagle3Head:
    """Return a random EAGLE-3 head for the target, with `draft_vocab` ids spread over the vocabulary, or all."""
    size = draft_vocab or target.vocab_size
    config = Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        target_hidden_size=target.hidden_size,
        aux_layers=default_aux_layers(target.num_layers),
    )
    token_ids = None
    if size < target.vocab_size:
        kept = np.sort(np.random.default_rng(seed).choice(target.vocab_size, size, replace=False))
        token_ids = mx.array(kept, mx.int32)
    head = Eagle3Head(config, token_ids)
    randomize(head, seed + 1, 0.2)
    return head


def tiny_target_folder(
    folder: Path, seed: int = 0, layers: int = 4, hidden: int = 32, architecture: str = "qwen3"
) -> Path:
    """Write a random model with the embedded tokenizer to disk, as mlx-lm loads it."""
    target = tiny_target(seed, layers, hidden, tokenizer=True, architecture=architecture)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_TARGET / name, folder / name)
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(target.model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {**tiny_config(layers, hidden, 4096), "eos_token_id": [2, 0]}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": architecture}))
    return folder


def target_with_two_heads(folder: Path) -> None:
    """Write a random model to `target`, and two random heads of it to `head0` and `head1`."""
    tiny_target_folder(folder / "target")
    for seed in (0, 1):
        save_eagle3(tiny_head(tiny_target(tokenizer=True), seed), folder / f"head{seed}", target_name="tiny")


def talking_target_folder(folder: Path, seed: int = 0, architecture: str = "qwen3") -> Path:
    """Do the same as `tiny_target_folder`, but every seventh token ends a turn, so that a random model soon stops."""
    tiny_target_folder(folder, seed, architecture=architecture)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, *range(5, 4096, 7)]}))
    return folder


def tiny_adapters(folder: Path, seed: int = 0, **settings: object) -> Path:
    """Write random LoRA weights for the tiny target, in the files of mlx_lm.lora."""
    lora = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**lora, **settings}))
    model = tiny_target(tokenizer=True).model
    linear_to_lora_layers(model, lora["num_layers"], lora["lora_parameters"])
    rng = np.random.default_rng(seed)
    weights = {
        name: mx.array(rng.normal(0, 0.1, value.shape), mx.float32)
        for name, value in tree_flatten(model.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def length_of(plan: Plan, draft: Draft) -> int:
    """Return the chain length that follows from this plan and the draft's confidences."""
    looks = [float(np.mean(row)) for row in draft.confidences]
    if plan.stop_below is None or all(look >= plan.stop_below for look in looks):
        assert len(looks) == (0 if plan.stop_below is None else max(0, plan.depth - CONFIDENCE_LAG - 1))
        return plan.depth
    assert all(look >= plan.stop_below for look in looks[:-1])
    return CONFIDENCE_LAG + len(looks)


class RowsState(ProposerState):
    """A proposer's state that consists of a list with one item for each row."""

    rows: list[Any]

    def append(self, other: RowsState) -> None:
        self.rows += other.rows

    def remove(self, row: int) -> None:
        self.rows[row] = self.rows[-1]
        self.rows.pop()


class Oracle(Proposer):
    """A proposer that knows each prompt's continuation and errs at random, so that all cases of acceptance occur."""

    name = "oracle"
    abilities = Abilities(trees=True)

    def __init__(
        self,
        texts: Mapping[tuple[int, ...], Sequence[int]],
        wrong: float,
        seed: int = 0,
        aux_layers: tuple[int, ...] = (),
    ):
        self.texts, self.wrong, self.rng = texts, wrong, np.random.default_rng(seed)
        self.aux_layers = aux_layers
        self.target: Target | None = None

    def bind(self, target: Target) -> None:
        self.target = target

    def open(self, prompts: Sequence[Sequence[int]]) -> OracleState:
        return OracleState(self, [known_text(self.texts, p) for p in prompts])


def known_text(texts: Mapping[tuple[int, ...], Sequence[int]], opened: Sequence[int]) -> tuple[list[int], int]:
    """Return the continuation of a prompt, and how much of it this text already contains."""
    cut = next(n for n in range(len(opened), 0, -1) if tuple(opened[:n]) in texts)
    return list(texts[tuple(opened[:cut])]), len(opened) - cut


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], pauses: float, seed: int = 0
) -> list[Output]:
    """Decode prompts while rows are paused at random after each step, with probability `pauses`."""
    rng = np.random.default_rng(seed)
    requests = [engine.prepare(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
        for request in requests:
            if request.finish_reason is None and rng.random() < pauses:
                engine.pause(request)
    return [engine.output(request) for request in requests]


class OracleState(RowsState):
    """Each row's continuation, and how much of it has been emitted."""

    def __init__(self, oracle: Oracle, rows: list[tuple[list[int], int]]):
        self.oracle, self.rows = oracle, rows

    def prefill(self, seen: Observation) -> None:
        assert self.oracle.target is not None
        assert all(x.shape[-1] == self.oracle.target.hidden_size for x in seen.aux)

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        return self._tree(plan.depth, plan.nodes) if plan.is_tree else self._chain(plan.depth)

    def _chain(self, depth: int) -> Draft:
        assert self.oracle.target is not None
        rng, vocab = self.oracle.rng, self.oracle.target.vocab_size
        tokens, lengths = [], []
        for text, at in self.rows:
            row = (text[at : at + depth] + [0] * depth)[:depth]
            tokens.append([int(rng.integers(vocab)) if rng.random() < self.oracle.wrong else t for t in row])
            lengths.append(int(rng.integers(depth + 1)))
        return Draft(mx.array(tokens, mx.int32), mx.array(lengths, mx.int32))

    def _tree(self, depth: int, nodes: int) -> Draft:
        """Return random trees. Some contain a part of the continuation, each branch at its own place."""
        grown = [self._grown(text[at:], depth, nodes) for text, at in self.rows]
        lengths = [int(self.oracle.rng.integers(nodes + 1)) for _ in grown]
        tokens, parents = (mx.array([tree[part] for tree in grown], mx.int32) for part in (0, 1))
        return Draft(tokens, mx.array(lengths, mx.int32), tree=Tree(parents, depth))

    def _grown(self, text: list[int], depth: int, nodes: int) -> tuple[list[int], list[int]]:
        assert self.oracle.target is not None
        rng, vocab = self.oracle.rng, self.oracle.target.vocab_size
        position, tip, levels = 0, 0, [0]
        taken: dict[int, set[int]] = {}
        tokens, parents = [], []
        for node in range(1, nodes + 1):
            above = int(rng.choice([n for n, level in enumerate(levels) if level < depth]))
            follows = position < len(text) and levels[tip] < depth and rng.random() > self.oracle.wrong
            above = tip if follows else above
            used = taken.setdefault(above, set())
            token = text[position] if follows else int(rng.choice([t for t in range(vocab) if t not in used]))
            if follows and token in used:
                position = len(text)  # a random node took its place
                token = int(rng.choice([t for t in range(vocab) if t not in used]))
            elif follows:
                position, tip = position + 1, node
            used.add(token)
            tokens.append(token)
            parents.append(above)
            levels.append(levels[above] + 1)
        return tokens, parents

    def observe(self, seen: Observation) -> None:
        assert all(x.shape[0] == len(self.rows) for x in seen.aux)
        self.rows = [(text, at + len(new)) for (text, at), new in zip(self.rows, seen.tokens, strict=True)]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run mlx-lm's functions operation by operation, even in full."""
    mx.disable_compile()
    try:
        yield
    finally:
        if FULL:
            mx.enable_compile()


@contextmanager
def steps_of(count: int) -> Iterator[None]:
    """Let buffers grow by only this many positions, so that short texts make them grow and shrink."""
    before, full.STEP = full.STEP, count
    try:
        yield
    finally:
        full.STEP = before


def interrupt_after(rows: int, error: type[BaseException], patch: pytest.MonkeyPatch) -> None:
    """Raise an error after this many rows of a file."""
    add, count = PartialFile.add, 0

    def counted(self: PartialFile, *args: Any) -> None:
        nonlocal count
        add(self, *args)
        count += 1
        if count == rows:
            raise error

    patch.setattr(PartialFile, "add", counted)
