"""How the target is loaded, as flags of a command: mlx-lm's own, under its names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.target import Target, load_target

_OF_THE_RENDERING = {"messages", "conversation", "tokenize", "return_dict", "return_tensors", "tools"}
"""What a template is given by whoever renders it."""


@dataclass(frozen=True)
class TargetOptions:
    """What `load_target` takes, under its names."""

    adapter_path: str | None = None
    trust_remote_code: bool = False
    extra_eos_tokens: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)

    def load(self, name: str | Path) -> Target:
        """Load a target so. Raises an EagleError where it cannot be had."""
        return load_target(name, **asdict(self))


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, under mlx-lm's names."""
    how = parser.add_argument_group("how the target is loaded, as in mlx-lm")
    how.add_argument("--adapter-path", metavar="DIR", help="LoRA adapters trained with mlx_lm.lora for this target")
    how.add_argument("--trust-remote-code", action="store_true", help="fetch and run the code that a model comes with")
    how.add_argument("--extra-eos-token", nargs="+", default=[], metavar="TOKEN", help="tokens that end a text as well")
    how.add_argument("--chat-template", metavar="TEXT", help="a chat template in place of the tokenizer's own")
    how.add_argument(
        "--chat-template-args",
        metavar="JSON",
        help="what the chat template takes, such as '{\"enable_thinking\": false}'",
    )


def options_of(args: argparse.Namespace) -> TargetOptions:
    """What the flags say. Raises ConfigError for template arguments that are no JSON object, or not a template's."""
    return TargetOptions(
        args.adapter_path,
        args.trust_remote_code,
        tuple(args.extra_eos_token),
        args.chat_template,
        _template_args(args.chat_template_args),
    )


def _template_args(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--chat-template-args is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise ConfigError("--chat-template-args must be an object, such as '{\"enable_thinking\": false}'")
    if reserved := sorted(values.keys() & _OF_THE_RENDERING):
        raise ConfigError(f"--chat-template-args: {reserved[0]!r} is not the template's; leave it out")
    return values
