"""Engines with the disk tier, for tests of its guarantees."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.models import qwen3

import eagle_mlx as em
from eagle_mlx.engine.disk import DiskTier, snapshot_file
from eagle_mlx.request_state import RequestState
from tests.architectures import tiny_model
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import randomize, tiny_config, tiny_target

MANY = 1 << 30
TEXT = [(7 * i * i + 3 * i) % 90 + 1 for i in range(150)]
SYSTEM = 100
"""Number of TEXT's tokens with which other prompts begin."""
GREEDY = em.SamplingParams(max_tokens=8, ignore_eos=True)
SEEDED = em.SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=7)
THRESHOLD = replace(SEEDED, acceptance="threshold", threshold=0.02)
KINDS = ["full", "quantised", "gemma3_text", "qwen3_next", "mamba2"]


@cache
def target(kind: str, seed: int = 0) -> em.Target:
    if kind == "full":
        return tiny_target(seed)
    wide = {**tiny_config(), "head_dim": 64}
    model = qwen3.Model(qwen3.ModelArgs(**wide)) if kind == "quantised" else tiny_model(kind)  # type: ignore[arg-type]
    randomize(model, seed, 0.2)
    return em.Target(model, name=kind)


def engine(folder: Path | None, kind: str = "full", drafts: str = "none", seed: int = 0, **more: Any) -> em.Engine:
    """Return an engine with files in this folder, or a cold one. `more`: `limit`, `say`, `which` for another target."""
    which, bits = more.get("which") or target(kind, seed), 8 if kind == "quantised" else None
    proposer = PROPOSERS[drafts](which)
    cached: dict[str, Any] = {}
    if folder is not None:
        say = more.get("say", said_of(()))
        files = DiskTier(folder, more.get("limit", MANY), which, proposer, bits, say)
        cached = {"prefix_cache_bytes": MANY, "prefix_files": files}
    return em.Engine(which, proposer, policy=em.FixedPolicy(3), max_batch=2, kv_bits=bits, **cached)


def said_of(allowed: Sequence[str], heard: list[str] | None = None) -> Callable[[str], None]:
    """Return a function for the tier's messages that fails the test if a message is not allowed."""

    def say(text: str) -> None:
        assert any(phrase in text for phrase in allowed), text
        if heard is not None:
            heard.append(text)

    return say


def disk(of: em.Engine) -> DiskTier:
    assert of.prefixes is not None
    assert of.prefixes.disk is not None
    return of.prefixes.disk


def answered(
    by: em.Engine, prompt: Sequence[int], params: em.SamplingParams = GREEDY, ends: Sequence[int] = ()
) -> RequestState:
    row = by.prepare(list(prompt), params, ends)
    by.submit(row)
    while row.finish_reason is None:
        by.step()
    return row


@cache
def cold(prompt: tuple[int, ...], kind: str = "full", drafts: str = "none", seed: int = 0) -> list[int]:
    """Return what an engine without files generates."""
    return answered(engine(None, kind, drafts, seed), prompt).tokens


def written(by: em.Engine) -> None:
    assert disk(by).close(60)


@cache
def _kept(kind: str, drafts: str, block: int) -> tuple[tempfile.TemporaryDirectory[str], list[int]]:
    folder = tempfile.TemporaryDirectory()
    first = engine(Path(folder.name), kind, drafts)
    tokens = answered(first, TEXT, ends=(SYSTEM,)).tokens
    written(first)
    return folder, tokens


def with_text(folder: Path, kind: str = "full", drafts: str = "none") -> list[int]:
    """Copy the files of an engine that has generated from TEXT to a folder; return its tokens."""
    kept, tokens = _kept(kind, drafts, snapshot_file.BLOCK)
    shutil.copytree(kept.name, folder, dirs_exist_ok=True)
    return tokens


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/block-*"), key=lambda path: path.name)


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.prefix"))
