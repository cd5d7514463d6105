"""The commands, each behind a look at whether the packages of its extra are installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from eagle_mlx.command import exit_code
from eagle_mlx.errors import ConfigError

EXTRAS = {
    "train": {"datasets": "datasets", "matplotlib": "matplotlib", "mlx-data": "mlx.data", "wandb": "wandb"},
    "serve": {
        "fastapi": "fastapi",
        "httpx": "httpx",
        "llguidance": "llguidance",
        "prometheus-client": "prometheus_client",
        "pydantic": "pydantic",
        "sse-starlette": "sse_starlette",
        "uvicorn": "uvicorn",
    },
}
"""What each extra of pyproject.toml brings: the package's name, and the module that it is imported as."""


def require(what: str, extra: str, *packages: str) -> None:
    """Raise ConfigError where packages of an extra are not installed, all of them unless some are named.

    `what` needs them: a command or a flag. The message says what to type.
    """
    missing = [name for name in packages or EXTRAS[extra] if not _installed(EXTRAS[extra][name])]
    if missing:
        raise ConfigError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f"type: pip install 'eagle-mlx[{extra}]'"
        )


def data() -> int:
    """`eagle-data`."""
    return _run("eagle-data", "data_pipelines.cli:main", "train")


def train() -> int:
    """`eagle-train`."""
    return _run("eagle-train", "train.cli:main", "train")


def convert() -> int:
    """`eagle-convert`."""
    return _run("eagle-convert", "train.convert.cli:main")


def publish() -> int:
    """`eagle-publish`, which reads what training wrote."""
    return _run("eagle-publish", "train.publish.cli:main", "train")


def generate() -> int:
    """`eagle-generate`."""
    return _run("eagle-generate", "serve.generate:main")


def bench() -> int:
    """`eagle-bench`, whose `--plot` asks for its package itself."""
    return _run("eagle-bench", "serve.bench.cli:main")


def heads() -> int:
    """`eagle-heads`."""
    return _run("eagle-heads", "serve.heads:main")


def serve() -> int:
    """`eagle-serve`."""
    return _run("eagle-serve", "serve.api.cli:command", "serve")


def _run(command: str, entry: str, extra: str | None = None) -> int:
    """The command's exit status; 2 if its extra is missing, 130 after a Ctrl-C that the command did not handle.

    The application is imported only after that look, which takes seconds in which somebody may interrupt it.
    """

    def work() -> int:
        if extra is not None:
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
