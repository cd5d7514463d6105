"""The flags of a model: what is loaded, how it drafts, what it may take. A file of models knows them by these names."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_mlx.target_options import add_target_arguments, options_of

from ..chat import Volatile
from ..memory import add_kv_gb, add_prefill_chunk, add_prefill_ms, bytes_of, prefill_chunk_of, prefill_ms_of
from ..speculation import add_arguments, from_arguments
from .loader import LoadConfig


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    add_target_arguments(parser)
    much = parser.add_argument_group("how much of a model")
    batch = LoadConfig.max_batch
    much.add_argument(
        "--max-batch", type=int, default=batch, metavar="N", help=f"requests that decode at once (default {batch})"
    )
    much.add_argument("--max-context", type=int, metavar="N", help="tokens of prompt and answer (default: the model's)")
    add_prefill_chunk(much)
    add_prefill_ms(much)
    add_kv_gb(much)
    much.add_argument(
        "--prefix-cache-gb",
        type=float,
        metavar="GB",
        help="of that, what past prompts may hold (default: a quarter of what is free behind the weights)",
    )
    much.add_argument(
        "--prefix-cache-dir", metavar="DIR", help="keep past prompts there too, for a server that is started again"
    )
    much.add_argument(
        "--prefix-disk-gb",
        type=float,
        metavar="GB",
        help="of all files there (default: a tenth of the disk, at most half of what is free on it)",
    )
    much.add_argument("--kv-bits", type=int, choices=(4, 8), help="keep keys and values in so few bits: less memory")
    much.add_argument(
        "--volatile",
        action="append",
        default=[],
        metavar="REGEX",
        help="what else to leave out of system prompts because it changes with every request; repeatable",
    )
    much.add_argument(
        "--keep-volatile",
        action="store_true",
        help="leave in what is known to change with every request, as agents' billing headers do",
    )


def load_config_of(args: argparse.Namespace) -> LoadConfig:
    """What the flags say. Raises ConfigError for what cannot be."""
    target, speculation = from_arguments(args)
    prefixes, kv = bytes_of("--prefix-cache-gb", args.prefix_cache_gb, least=0), bytes_of("--kv-gb", args.kv_gb)
    folder, files = args.prefix_cache_dir, bytes_of("--prefix-disk-gb", args.prefix_disk_gb)
    volatile = Volatile.of(args.volatile, not args.keep_volatile)
    return LoadConfig(
        target,
        speculation,
        args.max_batch,
        args.max_context,
        prefixes,
        args.kv_bits,
        options_of(args),
        kv,
        prefill_chunk_of(args),
        volatile,
        prefix_cache_dir=None if folder is None else Path(folder).expanduser(),
        prefix_disk_bytes=files,
        prefill_ms=prefill_ms_of(args),
    )
