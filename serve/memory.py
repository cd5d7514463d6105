"""Flags about memory, shared by all that decode."""

from __future__ import annotations

import argparse
import math

from eagle_mlx.errors import ConfigError


def add_kv_gb(to: argparse._ActionsContainer) -> None:
    """The flag for what keys and values may take."""
    to.add_argument(
        "--kv-gb",
        type=float,
        metavar="GB",
        help="for keys and values; who does not fit waits (default: four fifths of what is free behind the weights)",
    )


def bytes_of(flag: str, gigabytes: float | None, least: int = 1) -> int | None:
    """The bytes that a flag names, None where it is not given. Raises ConfigError for less than `least`."""
    if gigabytes is None:
        return None
    if not math.isfinite(gigabytes) or int(gigabytes * 1e9) < least:
        raise ConfigError(f"{flag} must be {'at least 0' if least == 0 else 'above 0'}; got {gigabytes}")
    return int(gigabytes * 1e9)
