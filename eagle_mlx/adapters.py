"""Additions to a target by its user: LoRA adapters, which mlx-lm loads, and a chat template and its arguments."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from jinja2 import Environment, TemplateSyntaxError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, TargetError, in_one_line, require

_FILES = ("adapter_config.json", "adapters.safetensors")  # the files in a folder of adapters
_OF_A_TEMPLATE = "{"  # every template that shows a message has one; file names should not


@dataclass(frozen=True)
class Adapter:
    name: str  # of their folder, without the path
    digest: str  # a hexadecimal hash of their files, the same on every machine


def adapter_folder(path: str | Path) -> Path:
    """Return the folder of adapters. Raises TargetError if a file is missing."""
    require("adapter_path", path, str | Path, "a folder")
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


def read_template(given: str | None) -> str | None:
    """Return the chat template given as text or in a file; None if none is given.

    Raises ConfigError if it is neither, or has a syntax error.
    """
    if not given:
        return None
    require("chat_template", given, str, "text, or the path of a file")
    text = given
    if _OF_A_TEMPLATE not in given:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as e:
            raise ConfigError(f"--chat-template {given} is not a template, and no file: {in_one_line(e)}") from e
        if _OF_A_TEMPLATE not in text:
            raise ConfigError(f"--chat-template {given}: the file has no template expression such as {{{{ … }}}}")
    try:  # with the statements that transformers adds
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as e:
        raise ConfigError(f"--chat-template has a syntax error in line {e.lineno}: {e.message}") from e
    return text


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
