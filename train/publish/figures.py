"""Measurements for a card, from the training run and from `eagle-bench --json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError

from ..config import SELF
from ..run import BEST
from .bundle import last_name, public, public_command
from .recipe import train_command
from .source import Source

_HEAD_MODES = ("eagle", "mtp")
"""Modes of eagle-bench in which a head drafts."""
_OWN_FLAGS = ("--json", "--plot", "--quiet", "--head", "--target")
"""Flags of eagle-bench that do not affect results, or that the card sets itself."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of one mode on one set of prompts."""

    data: str
    mode: str = "eagle"
    depth: str
    temperature: float = 0.0
    rows: int
    prompts: int
    left_out: int
    """Prompts left out because their continuation loops."""
    length: float
    """τ."""
    by_position: tuple[float, ...]
    tokens_per_second: float = 0.0
    of_mlx_lm: float | None = None
    of_plain: float | None = None
    identical: str = ""


@dataclass(frozen=True)
class Figures:
    """Measurements of one command."""

    command: str
    how: str
    machine: str
    taus: tuple[Measured, ...]
    """Results with this head."""
    speeds: tuple[Measured, ...] = ()
    """Results with and without it."""
    depth: int | None = None
    """Best draft tokens per round, if known."""


def of_training(source: Source, target: str) -> Figures | None:
    """Return this head's held-out acceptance from the run's report, or None.

    `target` is the hub id to show in the command.
    """
    report = source.report or {}
    found = (report.get("acceptance") or {}).get(source.which) or {}
    config = report.get("config") or {}
    if not found.get("prompts") or not found.get("acceptance_length"):
        return None
    data = config.get("eval_data") or next(iter(config.get("data") or ()), "") or "the training data"
    shown = "conversations made up by the target" if data == SELF else public(data)
    tau = Measured(
        data=f"{shown}, held out",
        depth=str(found["depth"]),
        rows=int(config.get("eval_batch") or 1),
        prompts=int(found["prompts"]),
        left_out=int(found.get("left_out") or 0),
        length=float(found["acceptance_length"]),
        by_position=tuple(map(float, found.get("acceptance_by_position") or ())),
    )
    how = "Measured while training by decoding held-out prompts"
    how += ", which chose this checkpoint" if source.which == BEST else ""
    how += f"; greedy, up to {config['eval_tokens']} new tokens each." if config.get("eval_tokens") else "; greedy."
    command, machine = train_command(config, target), machine_line(report.get("machine") or {})
    return Figures(command, how, machine, (tau,), (), int(found["depth"]))


def of_bench(file: Path, source: Source, repo: str, target: str) -> Figures:
    """Return the measurements in a file of `eagle-bench --json`.

    `repo` and `target` are the hub ids to show in the command. Raises ConfigError if the file is invalid, or if another
    head was measured.
    """
    written = _read(file)
    _check_head(file, written, source)
    try:
        data = last_name(str(written.get("prompts") or "prompts"))
        runs = [run for run in written["runs"] if run["prompts"]]
        speeds = tuple(_measured(run, data) for run in runs)
        with_head = [run for run in runs if run["mode"] in _HEAD_MODES]
        if not with_head:
            raise ConfigError(f"{file} has no results of a head; run eagle-bench with --head and mode eagle")
        taus = _first_of_each([one for one in speeds if one.mode in _HEAD_MODES])
        best = max(with_head, key=lambda run: (run["batch"] == 1, run["tokens_per_second"]))
        command = written.get("command") or "eagle-bench"
        return Figures(
            public_command(command, {"--target": target, "--head": repo}, _OWN_FLAGS),
            _how(written),
            machine_line({**(written.get("machine") or {}), "eagle_mlx": written.get("eagle_mlx")}),
            taus,
            speeds,
            int(best["depth"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"{file} was not written by this version of eagle-bench --json ({e!r})") from e


def _read(file: Path) -> Mapping[str, Any]:
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}; give the output of eagle-bench --json") from e
    if not isinstance(written, dict) or not isinstance(written.get("runs"), list):
        raise ConfigError(f"{file} is not the output of eagle-bench --json: it has no runs")
    return written


def _check_head(file: Path, written: Mapping[str, Any], source: Source) -> None:
    """Raise ConfigError if another head was measured. A file without a digest is trusted, unless its head is random."""
    digest = written.get("head_sha256")
    if written.get("head") == "random" or (digest and digest != hub.weights_digest(source.folder)):
        raise ConfigError(
            f"{file} has results of another head, {last_name(str(written.get('head')))}: its weights differ from those "
            f"in {source.folder}; measure this head"
        )


def _measured(run: Mapping[str, Any], data: str) -> Measured:
    count, of = run.get("identical_count"), run["prompts"] + run["left_out_looping"]
    return Measured(
        data=data,
        mode=str(run["mode"]),
        depth=_depth(run),
        temperature=float(run["temperature"]),
        rows=int(run["batch"]),
        prompts=int(run["prompts"]),
        left_out=int(run["left_out_looping"]),
        length=float(run["acceptance_length"]),
        by_position=tuple(map(float, run["acceptance_by_position"])),
        tokens_per_second=float(run["tokens_per_second"]),
        of_mlx_lm=run.get("ratio_to_mlx_lm"),
        of_plain=run.get("ratio_to_plain"),
        identical="" if count is None else f"{count} of {of}",
    )


def _first_of_each(taus: Sequence[Measured]) -> tuple[Measured, ...]:
    """Return one result for each depth and temperature, with the fewest rows; other rows repeat the same acceptance."""
    found: dict[tuple[str, float], Measured] = {}
    for tau in sorted(taus, key=lambda tau: tau.rows):
        found.setdefault((tau.depth, tau.temperature), tau)
    return tuple(tau for tau in taus if tau in found.values())


def _depth(run: Mapping[str, Any]) -> str:
    if not run["depth"]:
        return ""
    size = f"{run['depth']}, tree of {run['nodes']}" if run.get("nodes") else str(run["depth"])
    return size if run.get("policy", "fixed") == "fixed" else f"up to {size}"


def _how(written: Mapping[str, Any]) -> str:
    said = ["All modes decoded the same prompts in turns"]
    if written.get("max_tokens"):
        said.append(f"up to {written['max_tokens']} new tokens each")
    if written.get("repeats"):
        said.append(f"medians of {written['repeats']} repeats")
    if written.get("head_quantization"):
        said.append(f"the head quantized to {written['head_quantization']['bits']} bits")
    if written.get("acceptance") and any(run["temperature"] for run in written["runs"]):
        said.append(f"{written['acceptance']} acceptance of sampled drafts")
    return "; ".join(said) + "."


def machine_line(machine: Mapping[str, Any]) -> str:
    """Describe a machine in one line, from either command's report."""
    parts = [
        str(machine.get("cpu") or ""),
        f"{machine['cores']} cores" if machine.get("cores") else "",
        f"{machine['memory_gb']} GB" if machine.get("memory_gb") else "",
        str(machine.get("os") or machine.get("platform") or ""),
        f"EAGLE-MLX {machine['eagle_mlx']}" if machine.get("eagle_mlx") else "",
        f"MLX {machine['mlx']} on {_device(machine)}" if machine.get("mlx") else "",
        f"mlx-lm {machine['mlx_lm']}" if machine.get("mlx_lm") else "",
        f"BLAS: {public(machine['blas'])}" if machine.get("blas") else "",
    ]
    return ", ".join(part for part in parts if part)


def _device(machine: Mapping[str, Any]) -> str:
    """Return the device, such as `cpu` for both `cpu` and MLX's `Device(cpu, 0)`."""
    return str(machine.get("device") or "its default device").removeprefix("Device(").split(",")[0]
