"""Every name of mlx-lm that the project uses exists in the installed mlx-lm."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import version
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache

ROOT = Path(__file__).parent.parent


def used_names() -> list[tuple[str, str]]:
    """Return (module, name) for each `from mlx_lm… import name` and `mlx_lm.name`, without repetition."""
    found = set()
    for source in ("eagle_mlx", "train", "serve", "data_pipelines"):
        for file in (ROOT / source).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "mlx_lm" in text else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
                    found |= {(str(node.module), alias.name) for alias in node.names}
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mlx_lm":
                    found.add(("mlx_lm", node.attr))
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), used_names())
def test_it_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_enough_was_found() -> None:
    assert {("mlx_lm", "load"), ("mlx_lm", "stream_generate"), ("mlx_lm.models.cache", "KVCache")} <= set(used_names())


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (mlx_lm.stream_generate, {"max_tokens", "draft_model", "stream"}),
        (mlx_lm.batch_generate, {"max_tokens", "return_token_ids"}),
        (KVCache.update_and_fetch, {"keys", "values"}),
    ],
)
def test_it_takes_what_it_is_given(function: object, parameters: set[str]) -> None:
    assert parameters <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_the_one_pinned() -> None:
    assert version("mlx-lm").split(".")[:2] == ["0", "32"]
