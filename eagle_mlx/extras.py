"""Entry points of the commands, and the packages that only some of their work needs."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from eagle_mlx.command import exit_code
from eagle_mlx.errors import ConfigError
from eagle_mlx.late import late

EXTRAS = {
    "train": ("mlx-data", "pydantic"),
    "serve": (
        *("transformers", "fastapi", "starlette", "uvicorn", "h11", "pydantic", "pydantic-core"),
        *("sse-starlette", "prometheus-client", "llguidance"),
    ),
    "datasets": ("datasets",),
    "wandb": ("wandb",),
    "plots": ("matplotlib",),
}
"""The packages of each extra in pyproject.toml."""


def module_of(package: str) -> str:
    """Return the module that a package of an extra is imported as."""
    return "mlx.data" if package == "mlx-data" else package.replace("-", "_")


def require(what: str, extra: str) -> None:
    """Raise ConfigError, with the line to type, if packages of an extra are not installed; `what` needs them."""
    missing = [name for name in EXTRAS[extra] if not _installed(module_of(name))]
    if missing:
        raise ConfigError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f"type: pip install 'eagle-mlx[{extra}]'"
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _run(main: str) -> int:
    """Run a command; return its exit status, 130 after an unhandled Ctrl-C, even while it is imported."""
    return exit_code(late(f"eagle_mlx.{main}"))


data = partial(_run, "data_pipelines.cli:main")
train = partial(_run, "train.cli:main")
convert = partial(_run, "train.convert.cli:main")
publish = partial(_run, "train.publish.cli:main")
chat = partial(_run, "serve.terminal_chat:main")
generate = partial(_run, "serve.generate:main")
bench = partial(_run, "serve.bench.cli:main")
heads = partial(_run, "serve.heads:main")
doctor = partial(_run, "serve.doctor.cli:main")
serve = partial(_run, "serve.api.cli:command")
