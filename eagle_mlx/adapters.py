"""Additions to a target by its user: LoRA adapters, which mlx-lm loads, and arguments of the chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters

from eagle_mlx import hub
from eagle_mlx.errors import TargetError, in_one_line

_FILES = ("adapter_config.json", "adapters.safetensors")  # the files in a folder of adapters


@dataclass(frozen=True)
class Adapter:
    name: str  # of their folder, without the path
    digest: str  # a hexadecimal hash of their files, the same on every machine


def adapter_folder(path: str | Path) -> Path:
    """Return the folder of adapters. Raises TargetError if a file is missing."""
    folder = Path(path).expanduser()
    if missing := [name for name in _FILES if not (folder / name).is_file()]:
        raise TargetError(f"--adapter-path {folder} lacks {' and '.join(missing)}, which mlx_lm.lora writes there")
    return folder


def add_adapters(model: nn.Module, folder: Path) -> Adapter:
    """Add the adapters in a folder to a model. Raises TargetError if they do not fit it."""
    try:
        load_adapters(model, str(folder))
    except Exception as e:
        why = in_one_line(e)
        raise TargetError(f"the adapters in {folder} do not fit this model: {why}; were they trained for it?") from e
    model.eval()
    digests = [hashlib.sha256((folder / name).read_bytes()).digest() for name in _FILES]
    return Adapter(hub.public_name(folder), hashlib.sha256(b"".join(digests)).hexdigest()[:16])


class ChatTokenizer(TokenizerWrapper):
    """mlx-lm's tokenizer that passes fixed arguments to its chat template."""

    template_args: Mapping[str, Any] = {}

    def __init__(self, tokenizer: TokenizerWrapper, template_args: Mapping[str, Any]):
        """Do not use `tokenizer` afterwards: both share their state."""
        vars(self).update(vars(tokenizer))
        self.template_args = dict(template_args)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """Render messages as in mlx-lm, with the template's arguments; returns text or token ids."""
        return super().apply_chat_template(*args, **{**self.template_args, **kwargs})
