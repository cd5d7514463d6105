"""Load another version of the library next to this one, so that both can take turns in one process.

git worktree add out/older a30cf84
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_PACKAGE = "eagle_mlx"


class Older:
    """A checkout's package under names of its own. Its imports of the package find its own modules too."""

    def __init__(self, checkout: Path):
        """Raises SystemExit if the folder is not a checkout."""
        if not (checkout / _PACKAGE / "__init__.py").exists():
            raise SystemExit(f"error: {checkout} has no {_PACKAGE}; make it with: git worktree add {checkout} COMMIT")
        self._checkout = str(checkout.resolve())
        self._modules: dict[str, ModuleType] = {}

    def package(self) -> ModuleType:
        return self._found([_PACKAGE])

    def module(self, *names: str) -> ModuleType:
        """Return the first of these modules that exists, because files have been renamed."""
        return self._found([f"{_PACKAGE}.{name}" for name in names])

    def _found(self, names: Sequence[str]) -> ModuleType:
        mine, finders = _taken_out(), list(sys.meta_path)
        sys.modules.update(self._modules)
        sys.path.insert(0, self._checkout)
        # Leave out finders of editable installations, which would find modules that only this version has.
        sys.meta_path[:] = [finder for finder in finders if getattr(finder, "__module__", "").startswith("_frozen")]
        try:
            module = _first(names)
            for name in getattr(module, "__all__", ()):
                getattr(module, name)  # later, a name that is imported on its first use would be this version's
            return module
        finally:
            sys.meta_path[:] = finders
            sys.path.remove(self._checkout)
            self._modules = _taken_out()
            sys.modules.update(mine)


def _taken_out() -> dict[str, ModuleType]:
    """Remove the package's modules from `sys.modules` and return them."""
    names = [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


def _first(names: Sequence[str]) -> ModuleType:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or not name.startswith(e.name):
                raise
    raise SystemExit(f"error: that version has none of {', '.join(names)}")
