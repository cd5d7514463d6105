"""eagle-convert: converts heads to other servers' layouts, and extracts MTP heads from models. Its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.late import late
from eagle_mlx.setting import REQUIRED, Group, Limit, between, setting

from ..kind_settings import LAYOUTS

_LAYOUTS = f"{{{','.join(line.split()[0] for line in LAYOUTS.splitlines())}}}"
_BASE_MODEL = (
    "folder or hub id of the model that speculators and vLLM load in place of the target (default: the target or, if "
    "MLX has quantized it, the base model on its card)"
)
_Dtype = Literal["float32", "bfloat16", "float16"]
_INDEX = Limit(lambda index: index >= 0, "counts MTP layers from 0; got {}")


@dataclass(frozen=True)
class Extraction(Group):
    """The head to extract and its model. Raises ConfigError."""

    source: str = setting(REQUIRED, "folder or hub id of the published model", metavar="MODEL")
    output: str | None = setting(None, "folder for the head (default: the model's name and -mtp)", metavar="DIR")
    index: int = setting(0, "number of the MTP layer, from 0", _INDEX)
    bits: Literal[4, 8] | None = setting(None, "quantize the large matrices to this many bits")
    group_size: Literal[32, 64, 128] = setting(64, "with --bits: weights that share a scale")
    hidden: Literal["after", "before"] = setting("after", "the target's hidden state after or before its final norm")
    dtype: _Dtype | None = setting(None, "dtype of unquantized weights (default: the model's)")
    overwrite: bool = setting(False, "replace an existing output")

    def _check(self) -> None:
        if not self.source:
            raise ConfigError("no source: give the model's folder or hub id with --source")


@dataclass(frozen=True, kw_only=True)
class Conversion(Group):
    """The head to convert, and its new layout. Raises ConfigError."""

    source: str = setting(REQUIRED, "folder or hub id of the head", name="SOURCE", positional=True)
    to: str = setting(REQUIRED, "layout to write", metavar=_LAYOUTS)
    output: str = setting(REQUIRED, "folder for the converted head", metavar="DIR")
    target: str | None = setting(None, "folder or hub id of the model", metavar="MODEL")
    base_model: str | None = setting(None, _BASE_MODEL, metavar="MODEL")
    dtype: _Dtype | None = setting(None, "dtype of the weights (default: unchanged)")
    depth: int | None = setting(None, "--to speculators: tokens per round (default: SOURCE's, or 3)", between(1, 20))
    check: bool = setting(True, "test the head on the target; this takes a while")
    overwrite: bool = setting(False, "replace an existing output")

    def _check(self) -> None:
        if self.base_model is not None:
            late("eagle_mlx.catalog.base_model:check_base_model")(self.base_model)
