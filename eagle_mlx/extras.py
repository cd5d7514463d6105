"""Entry points of the commands, and the packages that only some of their work needs."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from importlib.util import find_spec

from eagle_mlx.command import exit_code
from eagle_mlx.errors import ConfigError
from eagle_mlx.late import late


def packages_of(extra: str) -> list[str]:
    from importlib.metadata import requires  # not at the top: `--help` needs no extra

    declared = (line.partition("; extra == ") for line in requires("eagle-mlx") or ())
    return [re.split(r"[^\w-]", package)[0] for package, _, name in declared if name.strip("'\"") == extra]


def module_of(package: str) -> str:
    return "mlx.data" if package == "mlx-data" else package.replace("-", "_")


def require(what: str, extra: str, *packages: str) -> None:
    """Raise ConfigError, with the line to type, if packages of an extra are not installed that `what` needs.

    packages: those that it needs, by default all.
    """
    missing = [name for name in packages or packages_of(extra) if find_spec(module_of(name)) is None]
    if missing:
        raise ConfigError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f"type: pip install 'eagle-mlx[{extra}]'"
        )


def _run(main: str) -> int:
    """Run a command; return its exit status, 130 after an unhandled Ctrl-C, even while it is imported.

    Closed standard streams are opened first: files would take their numbers, and MLX reads no file as number 0.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115
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
