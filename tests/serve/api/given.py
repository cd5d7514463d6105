"""The model for clients' tests: a tiny random one, or the one named by the environment.

    EAGLE_TEST_TARGET=checkpoints/target EAGLE_TEST_HEAD=checkpoints/head pytest tests/serve/api/test_client.py

tests/clients/README.md says which tests use it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import eagle_mlx as em

# isort: split
# Behind eagle_mlx, which brings the fast BLAS before MLX.
import mlx.core as mx

from tests.fakes import tiny_head, tiny_target
from tests.serve.api.over_ranks import RANKS, led
from tests.serve.chat.formats import target_of, with_format

TARGET = os.environ.get("EAGLE_TEST_TARGET") or None
"""Folder of a target."""
HEAD = os.environ.get("EAGLE_TEST_HEAD") or None
"""Folder of a head for it."""

PATIENCE = 60.0 if TARGET is None else 900.0
"""Seconds for an answer, or for loading the model."""


def given_target() -> em.Target:
    """Return a separate target for each engine, in float32, so that texts are the same in any batch."""
    return whole_target() if RANKS == 1 else led(whole_target)


def whole_target() -> em.Target:
    """Return the same in one process."""
    if TARGET is None:
        return tiny_target(tokenizer=True)
    return em.load_target(TARGET, mx.float32)


def given_target_of(name: str) -> em.Target:
    """Return the target with the chat format of this name."""
    return whole_target_of(name) if RANKS == 1 else led(whole_target_of, name)


def whole_target_of(name: str) -> em.Target:
    """Return the same in one process."""
    if TARGET is None:
        if RANKS > 1:
            return target_of.__wrapped__(name, True)  # each rank shards its own
        kept = target_of(name, True)
        return em.Target(kept.model, kept.tokenizer, name=name)  # an engine's end closes its target
    with tempfile.TemporaryDirectory() as folder:
        return em.load_target(with_format(Path(TARGET), name, Path(folder)), mx.float32)


def given_head(target: em.Target) -> em.HeadProposer:
    """Return a proposer with the target's head; a random head for a tiny target."""
    if TARGET is None:
        return em.HeadProposer(tiny_head(target, draft_vocab=512))
    assert HEAD is not None, "EAGLE_TEST_TARGET is set, and EAGLE_TEST_HEAD names no head for it"
    return em.HeadProposer(em.load_head(HEAD, target))
