"""Entry points of the commands, which first check that the packages of their extra are installed."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.util import find_spec

from eagle_mlx.command import HELP, exit_code
from eagle_mlx.errors import ConfigError

_PACKAGES = {
    "train": ("datasets", "matplotlib", "mlx-data", "pydantic", "wandb"),
    "serve": (
        *("fastapi", "h11", "httpx", "llguidance", "prometheus-client", "pydantic", "sse-starlette", "starlette"),
        "uvicorn",
    ),
}
EXTRAS = {
    extra: {name: "mlx.data" if name == "mlx-data" else name.replace("-", "_") for name in names}
    for extra, names in _PACKAGES.items()
}
"""The packages of each extra in pyproject.toml, and the modules that they are imported as."""


def require(what: str, extra: str, *packages: str) -> None:
    """Raise ConfigError if packages of an extra, by default all of them, are not installed.

    `what` needs them: a command or a flag. The message says what to type.
    """
    missing = [name for name in packages or EXTRAS[extra] if not _installed(EXTRAS[extra][name])]
    if missing:
        raise ConfigError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f"type: pip install 'eagle-mlx[{extra}]'"
        )


def _run(command: str, entry: str, extra: str | None = None) -> int:
    """Run a command; return its exit status: 2 if its extra is missing, 130 after an unhandled Ctrl-C.

    Help and version need no extra. The application is imported within `exit_code`, because that takes seconds in which
    the user may press Ctrl-C.
    """

    def work() -> int:
        if extra is not None and HELP.isdisjoint(sys.argv[1:]):
            require(command, extra)
        module, function = entry.split(":")
        status: int = getattr(importlib.import_module(f"eagle_mlx.{module}"), function)()
        return status

    return exit_code(work)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


data = partial(_run, "eagle-data", "data_pipelines.cli:main", "train")
train = partial(_run, "eagle-train", "train.cli:main", "train")
convert = partial(_run, "eagle-convert", "train.convert.cli:main")
publish = partial(_run, "eagle-publish", "train.publish.cli:main", "train")
chat = partial(_run, "eagle-chat", "serve.terminal_chat:main")
generate = partial(_run, "eagle-generate", "serve.generate:main")
bench = partial(_run, "eagle-bench", "serve.bench.cli:main")  # it checks for the package that `--plot` needs
heads = partial(_run, "eagle-heads", "serve.heads:main")
doctor = partial(_run, "eagle-doctor", "serve.doctor.cli:main")
serve = partial(_run, "eagle-serve", "serve.api.cli:command", "serve")
