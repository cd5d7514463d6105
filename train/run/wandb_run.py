"""A run at Weights & Biases: refused before training where it cannot work, given up where it fails later."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_mlx.errors import ConfigError

from ..config import TrainConfig
from ..evaluation import Generation, per_round

_ID = "run-id"
"""File in `wandb/` with the id under which a run continues."""
_FINISH_SECONDS = 8.0
"""How long the end of a run waits for uploads; what is left stays on the disk for `wandb sync`."""
_TEARDOWN_SECONDS = 20.0
"""How long it waits for wandb's own process to end after that."""


def check_wandb() -> None:
    """Raise ConfigError where Weights & Biases cannot be reached or does not know the user; asks on a terminal."""
    try:
        import wandb

        if wandb.setup().settings.mode == "online":
            wandb.login(verify=True)
    except Exception as e:
        raise _refusal(e) from e


class WandbRun:
    """Sends what a run tells. A failure after the beginning ends the sending with a word, never the training."""

    def __init__(self, folder: Path, config: TrainConfig, resume: bool):
        file = folder / "wandb" / _ID
        known = file.read_text().strip() if resume and file.exists() else None
        try:
            import wandb

            self._wandb: Any = wandb
            self._run: Any = wandb.init(
                project=config.run.wandb_project,
                config=config.flat(),
                dir=str(folder),
                id=known,
                resume="allow" if known else None,
                settings=wandb.Settings(finish_timeout=_FINISH_SECONDS),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")  # a run that continues may send a step again
        except Exception as e:
            raise _refusal(e) from e
        file.parent.mkdir(exist_ok=True)
        file.write_text(self._run.id + "\n")

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Numbers by name, lists and dicts taken apart."""
        self._try(lambda: self._run.log({"step": step, **flatten(kind, values)}))

    def show(self, step: int, generations: Sequence[Generation]) -> None:
        """A table of texts."""

        def send() -> None:
            columns = ["prompt", "text", "tokens", "rounds", "tokens per round"]
            cells = [[*(g[k] for k in ("prompt", "text", "tokens", "rounds")), per_round(g)] for g in generations]
            self._run.log({"step": step, "generations": self._wandb.Table(columns=columns, data=cells)})

        self._try(send)

    def summarize(self, values: Mapping[str, Any], pictures: Iterable[Path]) -> None:
        """What the run came to, and its plots."""

        def send() -> None:
            self._run.summary.update(flatten("final", values))
            images = {f"plots/{file.stem}": self._wandb.Image(str(file)) for file in pictures}
            if images:
                self._run.log(images)

        self._try(send)

    def finish(self, failed: bool) -> None:
        self._try(lambda: self._run.finish(exit_code=int(failed)))
        end_service(_TEARDOWN_SECONDS)

    def _try(self, work: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            work()
        except Exception as e:
            self._run = None
            tqdm.write(
                f"warning: Weights & Biases failed ({_first_line(e)}); the run continues without it, and its files "
                "have everything",
                file=sys.stderr,
            )


def end_service(seconds: float) -> None:
    """End the process that wandb works in, by force if it has not gone after so long.

    It has been seen to stay for ever, and wandb waits as long for it when the interpreter ends.
    """
    import wandb

    ending = threading.Thread(target=wandb.teardown, daemon=True)
    ending.start()
    ending.join(seconds)
    if ending.is_alive():
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["pkill", "-KILL", "-P", str(os.getpid()), "wandb-core"], check=False)
        ending.join(seconds)


def flatten(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": [x, y]}` as `{"prefix/a/0": x, "prefix/a/1": y}`, which W&B can draw."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            flat |= flatten(key, value)
        elif isinstance(value, list):
            flat |= {f"{key}/{i}": item for i, item in enumerate(value)}
        else:
            flat[key] = value
    return flat


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(
        f"Weights & Biases cannot be used: {_first_line(error)}; type `wandb login`, set WANDB_MODE=offline to upload "
        "later, or leave --wandb out"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
