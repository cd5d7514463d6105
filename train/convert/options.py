"""Settings of eagle-convert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.late import late
from eagle_mlx.setting import REQUIRED, Group, Limit, between, setting

from ..kind_settings import LAYOUTS

_NAMES = [line.split()[0] for line in LAYOUTS.splitlines()]
Hidden = Literal["after", "before"]
OVERWRITE = "replace an existing output"
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Extraction(Group):
    """The head to extract and its model. Raises ConfigError."""

    source: str = setting(REQUIRED, "folder or hub id of the published model", metavar="MODEL")
    output: str | None = setting(None, "folder for the head (default: the model's name and -mtp)", metavar="DIR")
    index: int = setting(
        0, "number of the MTP layer, from 0", Limit(lambda index: index >= 0, "counts MTP layers from 0; got {}")
    )
    bits: Literal[4, 8] | None = setting(None, "quantize the large matrices to this many bits")
    group_size: Literal[32, 64, 128] = setting(64, "with --bits: weights that share a scale")
    hidden: Hidden = setting("after", "use the target's hidden state after or before its final norm")
    dtype: Dtype | None = setting(None, "dtype of unquantized weights (default: the model's)")
    overwrite: bool = setting(False, OVERWRITE)

    def _check(self) -> None:
        if not self.source:
            raise ConfigError("no source: give the model's folder or hub id with --source")


@dataclass(frozen=True, kw_only=True)
class Conversion(Group):
    """The head to convert, and its new layout. Raises ConfigError."""

    given: str | None = setting(None, "folder or hub id of the head", name="SOURCE", positional=True)
    named: str | None = setting(None, "the same as SOURCE", name="source", metavar="SOURCE")
    to: str = setting(
        REQUIRED, "layout to write", metavar=f"{{{','.join(line.split()[0] for line in LAYOUTS.splitlines())}}}"
    )
    output: str = setting(REQUIRED, "folder for the converted head", metavar="DIR")
    target: str | None = setting(None, "folder or hub id of the model", metavar="MODEL")
    base_model: str | None = setting(
        None,
        "folder or hub id of the model that speculators and vLLM load in place of the target (default: the "
        "target or, if MLX has quantized it, the base model on its card)",
        metavar="MODEL",
    )
    dtype: Dtype | None = setting(None, "dtype of the weights (default: unchanged)")
    depth: int | None = setting(
        None, "with --to speculators: draft tokens per round (default: as in SOURCE, or 3)", between(1, 20)
    )
    check: bool = setting(True, "test the head on the target; this takes a while")
    overwrite: bool = setting(False, OVERWRITE)

    def _check(self) -> None:
        if bool(self.given) == bool(self.named):
            raise ConfigError("give the head's folder or hub id, either as SOURCE or with --source")
        if self.base_model is not None:
            late("eagle_mlx.catalog.base_model:check_base_model")(self.base_model)

    @property
    def source(self) -> str:
        """Folder or hub id of the head."""
        return self.given or self.named or ""
