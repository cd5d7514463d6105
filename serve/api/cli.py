"""The command `eagle-serve`: serves one or several models over OpenAI's API."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from eagle_mlx.command import HELP, arguments, exit_code, read
from eagle_mlx.extras import require
from eagle_mlx.late import late

from .. import launch
from .options import ServeOptions

EPILOG = """\
examples:
  eagle-serve                                                 the included target and head, at http://127.0.0.1:8000
  eagle-serve --target Qwen3-4B-4bit                          a model, with the head that is found for it
  eagle-serve --target Qwen3-4B-4bit --head user/head         a model with its EAGLE head
  eagle-serve --target Qwen3-4B-4bit --spec-decode ngram      no second model: n-grams of the text draft
  eagle-serve --target Qwen3-4B-4bit --head user/head --check test that speculation does not change the text
  eagle-serve --models models.yaml                            several models, each loaded on demand
  EAGLE_API_KEY=secret eagle-serve --host 0.0.0.0             for other machines that send the key

then, with a coding agent: eagle-serve launch claude|codex|opencode [--run]    (eagle-serve launch --help)
or with any OpenAI client:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Write a haiku."}], "stream": true}'
  OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

models.yaml lists models by name, with flags as keys, without their dashes:
  default: {max-batch: 4}                                     # settings for all models
  small: {target: Qwen3-0.6B-4bit, spec-decode: ngram}
  large: {target: Qwen3-4B-4bit, head: user/head, kv-gb: 4}
A request names its model in "model". If memory runs short, the model that has been idle longest is unloaded. POST
/admin/load and /admin/unload with {"model": "small"} load and unload a model at once.

A request can disable speculation with "spec_decode": "none", or limit it with "num_speculative_tokens"; POST
/admin/speculation changes the default. /health returns starting, ready, stuck or draining; /metrics is for Prometheus.
After SIGTERM, requests in progress finish first."""


LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-serve. Returns the exit status: 0, 1 if --check fails, or 2 for an error."""
    given = arguments(argv)
    if given[:1] == ["launch"]:
        return launch.main(given[1:])
    about = "Serve a model over HTTP with OpenAI's API and speculative decoding: the same text, sooner."

    def work() -> int:
        if HELP.isdisjoint(given):
            require("eagle-serve", "serve")
        status: int = late(f"{__package__}.start:run")(read(ServeOptions, given, "eagle-serve", about, EPILOG))
        return status

    return exit_code(work)


def command() -> NoReturn:
    """Run eagle-serve as a process and exit with `main`'s status."""
    logging.basicConfig(format=LOG_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S%z", level=logging.WARNING)
    logging.getLogger("eagle_mlx").setLevel(logging.INFO)
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # After it can be joined, the engine's thread still releases MLX's compiled functions, which are Python objects.
    # That would abort an interpreter that is shutting down, so skip the shutdown.
    os._exit(status)


if __name__ == "__main__":
    command()
