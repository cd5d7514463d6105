"""Imports that wait until they are needed, so that `--help` and `import eagle_mlx` import neither MLX nor mlx-lm."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


def late(function: str) -> Callable[..., Any]:
    """Return a function that imports `module:function` when it is called, and calls it."""
    return lambda *args: resolve_name(function)(*args)


def late_names(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562): it imports on first use what type checkers see in its `file`.

    These are the imports under `if TYPE_CHECKING`.
    """
    blocks = [node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: "." * node.level + (node.module or "") for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(sys.modules[package])[name] = getattr(import_module(modules[name], package), name)
        return value

    return get
