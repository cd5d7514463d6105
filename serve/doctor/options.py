"""Settings of eagle-doctor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.setting import ABOVE_0, Group, setting
from eagle_mlx.target_options import TargetOptions

USUAL = ("qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b", "smollm2-135m")
"""The shapes of which the first that fits is the default on a GPU; on a CPU it is the last."""
PRINT = "-"


@dataclass(frozen=True)
class DoctorOptions(Group):
    """The things to measure."""

    shape: str | None = setting(
        None,
        f"build a model of these sizes with random weights; an unknown name lists all (default: the first of "
        f"{', '.join(USUAL[:-1])} that fits; on a CPU {USUAL[-1]})",
        metavar="NAME",
    )
    target: str | None = setting(None, "measure this model, a folder or hub id", metavar="MODEL")
    bits: Literal[4, 8, 16] | None = setting(
        None, "bits of random weights; 16 is not quantized (default: 4; on a CPU under Linux 16)"
    )
    seconds: float = setting(20.0, "limit of each part; slow machines measure fewer sizes", ABOVE_0, metavar="S")
    json: str | None = setting(
        None, "write the figures as JSON; without a file, print them", metavar="FILE", bare=PRINT
    )
    loading: TargetOptions = field(default_factory=TargetOptions)

    def _check(self) -> None:
        if self.target is not None and (self.shape is not None or self.bits is not None):
            raise ConfigError("--target is measured as it is; leave out --shape and --bits")
        if self.target is None and self.loading.shard != "none":
            raise ConfigError("--shard divides a real model; give --target")
