"""Settings of learning from requests. They need neither MLX nor an extra, so that `--help` works without them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx.errors import ConfigError
from eagle_mlx.setting import GIGABYTES, Group, Limit, flag, setting

LEARN_GB = 4.0
"""By default: 900,000 tokens of a small model with 576 numbers per layer, 120,000 of one with 4,096."""


@dataclass(frozen=True)
class LearnOptions(Group):
    """Learning of the head from the server's answers."""

    folder: Path | None = setting(
        None,
        "the head learns from requests; texts, hidden states and versions of the head are in this folder, readable by "
        "its owner alone (default: it does not learn)",
        name="learn",
        metavar="FOLDER",
    )
    disk_gb: float = setting(
        LEARN_GB, "limit of the texts in that folder; the oldest leave first", GIGABYTES, "learn_gb"
    )
    share: float = setting(
        0.0,
        "share of the time for learning while requests decode; with 0, it learns only while there are none",
        Limit(lambda share: 0 <= share <= 0.5, "must be from 0 to 0.5, not {}"),
        "learn_share",
    )
    redact: tuple[str, ...] = setting(
        (), "leave out texts that match; repeatable", name="learn_redact", metavar="REGEX", repeat=True
    )

    def _check(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"--learn-redact {pattern!r} is not a regular expression: {e}") from e
        if self.folder is None:
            for name, default in (("learn_gb", LEARN_GB), ("learn_share", 0.0), ("learn_redact", ())):
                if self.value(name) != default:
                    raise ConfigError(
                        f"{flag(name)} needs --learn, the folder in which the server keeps what it learns"
                    )
