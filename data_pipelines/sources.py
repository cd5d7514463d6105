"""Where conversations come from: the standard library, local files, data sets of the hub."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from eagle_mlx.errors import ConfigError, DataError

from . import builtin, tables
from .conversation import Conversation, parse_row
from .stdlib_source import HELDOUT_ONE_IN

SPLITS = ("train", "heldout", "all")

SPECS = """\
  builtin:python             functions of the running Python's standard library as conversations, some plain files
  builtin:python-chat        the conversations alone
  builtin:python-docstrings  the conversations whose function has a docstring
  builtin:python-files       plain files alone, in pieces
  chats.jsonl, .json, .parquet    a local file
  user/name, user/name:split, user/name:config:split    a data set of the hub"""

_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


def load_conversations(
    spec: str, split: builtin.Side = "train", limit: int | None = None, seed: int | None = 0
) -> Iterator[Conversation]:
    """Yield the conversations that `spec` names (see `SPECS`), at most `limit`.

    One in 25 is held out: by file for the built-in source, elsewhere by a hash of the prompt, so that the same prompt
    is never on both sides and regenerated answers stay on their side. `seed` fixes the order; None keeps the source's
    own. Raises DataError, with file and line where there are any, for a source or a row that cannot be used; JSON
    files are checked from end to end before the first conversation is yielded.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: it must be train, heldout or all")
    if spec.startswith("builtin:"):
        found = builtin.iter_conversations(spec, split, seed)
    elif Path(spec).suffix in tables.SUFFIXES:
        found = _rows(tables.open_file(Path(spec)), spec, split, seed)
    elif not Path(spec).exists() and _HUB.fullmatch(spec):
        found = _rows(tables.open_hub(spec), spec, split, seed)
    else:
        raise DataError(f"{spec} is no source of conversations; these are:\n{SPECS}")
    return islice(found, limit)


def _rows(data: tables.Rows, spec: str, split: builtin.Side, seed: int | None) -> Iterator[Conversation]:
    order = list(range(len(data)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    for index in order:
        conversation = parse_row(data[index], f"{spec}:{index + 1}")
        held_out = conversation.prompt_key() % HELDOUT_ONE_IN == 0
        if split == "all" or held_out == (split == "heldout"):
            yield conversation
