"""Options to load the target: flags and settings of every command, named as in mlx-lm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.setting import ABOVE_0, RANK_SECONDS, Group, setting

if TYPE_CHECKING:
    from eagle_mlx.target import Target

_OF_THE_RENDERING = {
    *("messages", "conversation", "tools", "add_generation_prompt"),
    *("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
}
"""Arguments that are set by the code that renders a template."""


@dataclass(frozen=True)
class TargetOptions(Group):
    """Options to load the target, as in mlx-lm."""

    adapter_path: str = setting("", "LoRA adapters trained with mlx_lm.lora for this target", metavar="DIR")
    trust_remote_code: bool = setting(False, "download and run the model's own code")
    extra_eos_tokens: tuple[str, ...] = setting(
        (), "additional tokens that end a text", name="extra_eos_token", metavar="TOKEN"
    )
    chat_template: str = setting(
        "", "chat template, or a file with one, to use instead of the tokenizer's", metavar="TEXT_OR_FILE"
    )
    chat_template_args: str = setting(
        "", "arguments of the chat template (such as '{\"enable_thinking\": false}')", metavar="JSON"
    )
    shard: Literal["none", "tensor", "pipeline"] = setting(
        "none",
        "divide the target among the processes of mlx.launch: each gets a part of every layer (tensor), or "
        "some of the layers (pipeline, without a head)",
    )
    rank_seconds: float = setting(
        RANK_SECONDS, "with --shard: exit if a process does not answer for this long", ABOVE_0, metavar="S"
    )
    wire: bool = setting(True, "on a Mac, keep weights from being paged out; at most three fifths of its memory")

    def _check(self) -> None:
        _template_args(self.chat_template_args)

    def load(self, name: str | Path, lazy: bool = False) -> Target:
        """Load a target with these options; with `lazy`, read only its files' headers.

        With `shard`, this returns only in rank 0; the other ranks follow it until it ends, and then raise SystemExit.
        Raises an EagleError if the target, its adapters or a template's file is not available.
        """
        if self.shard != "none" and not lazy:
            from eagle_mlx.ranks import load_over_ranks

            return load_over_ranks(name, self.shard, self.rank_seconds, self.wire_active, **self.arguments())
        from eagle_mlx.target import load_target

        return load_target(name, lazy=lazy, **self.arguments())

    def wire_active(self) -> None:
        """Wire the memory in use, unless `wire` is off; call this once the target and the draft model are loaded."""
        if self.wire:
            from eagle_mlx.memory import wire_active

            wire_active()

    def follow(self, name: str | Path) -> None:
        """Load the target and follow rank 0 until it ends, then raise SystemExit; in rank 0, do nothing.

        For commands that load the target outside of the main thread.
        """
        if self.shard != "none":
            from eagle_mlx.ranks import ProcessGroup

            if not ProcessGroup.init().is_rank_zero:
                self.load(name)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `load_target`."""
        return {
            "adapter_path": self.adapter_path or None,
            "trust_remote_code": self.trust_remote_code,
            "extra_eos_tokens": self.extra_eos_tokens,
            "chat_template": self.chat_template or None,
            "chat_template_args": _template_args(self.chat_template_args),
        }


def _template_args(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--chat-template-args is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise ConfigError("--chat-template-args must be an object, such as '{\"enable_thinking\": false}'")
    if reserved := sorted(values.keys() & _OF_THE_RENDERING):
        raise ConfigError(f"--chat-template-args: {reserved[0]!r} is not an argument of the template; leave it out")
    return values
