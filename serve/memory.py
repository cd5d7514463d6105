"""Flags about memory, and what of a prompt is read at once; shared by all that decode."""

from __future__ import annotations

import argparse
import math

from eagle_mlx.engine.prefill import LEAST_CHUNK, PREFILL_CHUNK, PREFILL_MS
from eagle_mlx.errors import ConfigError


def add_kv_gb(to: argparse._ActionsContainer) -> None:
    """The flag for what keys and values may take."""
    to.add_argument(
        "--kv-gb",
        type=float,
        metavar="GB",
        help="for keys and values; requests that do not fit wait (default: four fifths of what the weights leave free, "
        "or three fifths on a machine of up to 16 GB)",
    )


def add_prefill_chunk(to: argparse._ActionsContainer) -> None:
    """The flag for how much of prompts a forward reads."""
    to.add_argument(
        "--prefill-chunk",
        type=int,
        default=PREFILL_CHUNK,
        metavar="N",
        help="tokens of prompts read in one forward, all requests together; more takes more memory, and those that "
        f"decode meanwhile wait longer for their next tokens (default {PREFILL_CHUNK})",
    )


def add_prefill_ms(to: argparse._ActionsContainer) -> None:
    """Add the flag for how long those that decode wait for a chunk."""
    to.add_argument(
        "--prefill-ms",
        type=float,
        default=PREFILL_MS,
        metavar="MS",
        help="milliseconds that reading prompts may hold up those that decode, each time; at least "
        f"{LEAST_CHUNK} tokens are read (default {PREFILL_MS})",
    )


def prefill_ms_of(args: argparse.Namespace) -> float:
    """Return what the flag says. Raise ConfigError unless it is above 0."""
    if not args.prefill_ms > 0:
        raise ConfigError(f"--prefill-ms must be above 0; got {args.prefill_ms}")
    return float(args.prefill_ms)


def prefill_chunk_of(args: argparse.Namespace) -> int:
    """What the flag says. Raises ConfigError for less than 1."""
    if args.prefill_chunk < 1:
        raise ConfigError(f"--prefill-chunk must be at least 1; got {args.prefill_chunk}")
    return int(args.prefill_chunk)


def bytes_of(flag: str, gigabytes: float | None, least: int = 1) -> int | None:
    """The bytes that a flag names, None where it is not given. Raises ConfigError for less than `least`."""
    if gigabytes is None:
        return None
    if not math.isfinite(gigabytes) or int(gigabytes * 1e9) < least:
        raise ConfigError(f"{flag} must be {'at least 0' if least == 0 else 'above 0'}; got {gigabytes}")
    return int(gigabytes * 1e9)
