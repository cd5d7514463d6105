"""Reports of a run: metrics.jsonl while it runs, report.json at the end, and optionally Weights & Biases.

If Weights & Biases does not work, the run does not start. If it fails later, the run continues without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from tqdm import tqdm

from eagle_mlx.errors import ConfigError
from eagle_mlx.extras import require

from ..config import TrainSettings
from ..evaluation import Generation, per_round, write_generations
from ..report import METRICS, PICTURES, Row, truncate


def check_wandb() -> None:
    """Raise ConfigError if Weights & Biases is unreachable or the login fails. Prompts for the key on a terminal."""
    require("--wandb", "wandb")
    try:
        import wandb

        if wandb.setup().settings.mode == "online":
            wandb.login(verify=True)
    except Exception as e:
        raise _refusal(e) from e


class WandbRun:
    """Sends a run's metrics to W&B. A failure after the start prints a warning, and training continues without it."""

    def __init__(self, folder: Path, config: TrainSettings, resume: bool):
        file = folder / "wandb" / "run-id"  # to resume the W&B run
        run_id = file.read_text().strip() if resume and file.exists() else None
        try:
            import wandb

            self._wandb: Any = wandb
            self._run: Any = wandb.init(
                project=config.run.wandb_project,
                config=config.flat(),
                dir=str(folder),
                id=run_id,
                resume="allow" if run_id else None,
                settings=wandb.Settings(finish_timeout=8.0),  # seconds; the rest stays on disk for `wandb sync`
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")  # a resumed run may send a step again
        except Exception as e:
            raise _refusal(e) from e
        file.parent.mkdir(exist_ok=True)
        file.write_text(self._run.id + "\n")

    def log(self, kind: str, step: int, values: Mapping[str, Any], texts: Sequence[Generation]) -> None:
        """Send values by name, with lists and dicts flattened, and a table of texts."""

        def send() -> None:
            sent = {"step": step, **_flat(kind, values)}
            if texts:
                columns = ["prompt", "text", "tokens", "rounds", "tokens per round"]
                cells = [[t["prompt"], t["text"], t["tokens"], t["rounds"], per_round(t)] for t in texts]
                sent["generations"] = self._wandb.Table(columns=columns, data=cells)
            self._run.log(sent)

        self._try(send)

    def summarize(self, values: Mapping[str, Any], plots: Iterable[Path]) -> None:
        def send() -> None:
            self._run.summary.update(_flat("final", values))
            self._run.log({f"plots/{file.stem}": self._wandb.Image(str(file)) for file in plots})

        self._try(send)

    def finish(self, failed: bool) -> None:
        self._try(lambda: self._run.finish(exit_code=int(failed)))
        end_service(20)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            if self._run is not None:
                work()
        except Exception as e:
            self._run = None
            tqdm.write(
                f"warning: Weights & Biases failed ({_first_line(e)}); the run continues without it, and its own "
                "files are complete",
                file=sys.stderr,
            )


def end_service(seconds: float) -> None:
    """Shut down wandb's process, or kill it after this many seconds: some never end, and the exit waits for them."""
    import wandb

    ending = threading.Thread(target=wandb.teardown, daemon=True)
    ending.start()
    ending.join(seconds)
    if ending.is_alive():
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["pkill", "-KILL", "-P", str(os.getpid()), "wandb-core"], check=False)
        ending.join(seconds)


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"a": [x, y]}` to `{"prefix/a/0": x, "prefix/a/1": y}`, which W&B can plot."""
    leaves = cast(list[tuple[str, Any]], tree_flatten({prefix: dict(values)}))
    return {name.replace(".", "/"): value for name, value in leaves}


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(
        f"Weights & Biases cannot be used: {_first_line(error)}; run `wandb login`, set WANDB_MODE=offline to upload "
        "later, or leave --wandb out"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class Tracker:
    """Writes metrics and sample texts. Use it as a context manager.

    `resume_step`: the last step of a resumed run. Lines of later steps are dropped, and steps that are already logged
    are ignored. Raises DataError if existing lines are damaged, ConfigError if Weights & Biases does not work.
    """

    def __init__(self, folder: Path, config: TrainSettings, resume_step: int | None = None):
        file = folder / METRICS
        self.rows: list[Row] = [] if resume_step is None else truncate(file, resume_step)  # also of interrupted runs
        self._logged = {(row["kind"], row["step"]) for row in self.rows}
        self._folder, self._config = folder, config
        self._wandb = WandbRun(folder, config, resume=resume_step is not None) if config.run.wandb else None
        self._file = file.open("w" if resume_step is None else "a", encoding="utf-8")

    def log(self, kind: Literal["train", "eval"], step: int, values: Mapping[str, Any]) -> None:
        """Append a line with kind, step, values, learning rates of a `learning_rate_factor`, and memory use."""
        if (kind, step) in self._logged:
            return
        row = {"kind": kind, "step": step, **values, **self._rates(values), "memory_gb": memory_gb()}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        generations = values.get("generations") or []
        if generations:
            write_generations(self.rows, self._folder)
        if self._wandb is not None:
            sent = {name: value for name, value in row.items() if name not in ("kind", "step", "generations")}
            self._wandb.log(kind, step, sent, generations)

    def summarize(self, values: Mapping[str, Any]) -> None:
        if self._wandb is not None:
            plots = [self._folder / name for name in PICTURES]
            self._wandb.summarize(values, filter(Path.exists, plots))

    def _rates(self, values: Mapping[str, Any]) -> dict[str, float]:
        rates, factor = self._config.optimization, values.get("learning_rate_factor")
        if factor is None:
            return {}
        muon = {"muon_learning_rate": rates.muon_lr * factor} if rates.optimizer == "muon" and rates.muon_lr else {}
        return {"learning_rate": rates.lr * factor, **muon}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(failed=error is not None)


def memory_gb() -> dict[str, float]:
    """Return gigabytes (10⁹ bytes): MLX's active and peak memory, and the process's peak memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sizes = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "process_peak": most}
    return {name: round(size / 1e9, 4) for name, size in sizes.items()}
