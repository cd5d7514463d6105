"""The command `eagle-publish`: upload a local head with its card to the hub."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.command import exit_code, read
from eagle_mlx.late import late

from . import PublishOptions

_HELP = """\
Publish a head with a model card that gives its target, its acceptance and how to use it.

DIR is a head's folder (config.json and .safetensors) or the output folder of eagle-train. From the latter, the best
head is uploaded with the run's report and plots.
"""
_EXAMPLES = """\
examples:
  eagle-publish out/head --repo you/qwen3-4b-eagle3 --license apache-2.0 --dry-run
  eagle-bench --target Qwen3-4B-4bit --head out/head/best --depth 1 2 4 6 --prompts chats.jsonl --json chats.json
  eagle-publish out/head --repo you/qwen3-4b-eagle3 --license apache-2.0 --base-model Qwen/Qwen3-4B --figures chats.json

--dry-run shows the files and the card without using the network.

The token needs write access (https://huggingface.co/settings/tokens). It is the first one found in:
  1. --token
  2. the environment variable HF_TOKEN
  3. the login saved by `hf auth login`
Set HF_ENDPOINT to use another hub than https://huggingface.co.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Publish a head; return 0, 2 for an error that the user can fix, or 130 if interrupted."""
    return exit_code(
        lambda: late(f"{__package__}.upload:run")(read(PublishOptions, argv, "eagle-publish", _HELP, _EXAMPLES))
    )
