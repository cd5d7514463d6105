"""The settings of a model, as flags, and in a file of models under the names of the flags."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import read_yaml
from eagle_mlx.target_options import add_target_arguments, options_of

from ..chat import Volatile
from ..memory import add_kv_gb, add_prefill_chunk, add_prefill_ms, bytes_of, prefill_chunk_of, prefill_ms_of
from ..speculation import AUTO, NO_HEAD, add_arguments, from_arguments
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


DEFAULT = "default"
"""The entry whose settings all models share."""
_KEPT_NAMES = {AUTO, NO_HEAD}
"""Values of `head` that are no places."""


def read_models(file: Path) -> dict[str, LoadConfig]:
    """The models of a file by name. Nothing is loaded or fetched.

    Raises ConfigError that names file, entry and remedy for what cannot be read, is not known, given twice or missing.
    """
    entries = _read(file)
    shared = entries.pop(DEFAULT, None)
    if not entries:
        raise ConfigError(f"{file} names no model; write one as `name: {{target: folder or hub id}}`")
    settings = {name: _settings(file, name, values) for name, values in [(DEFAULT, shared), *entries.items()]}
    shared = settings.pop(DEFAULT)
    return {name: _config(file, name, {**shared, **own}) for name, own in settings.items()}


def _read(file: Path) -> dict[str, Any]:
    entries = read_yaml(file, "file of models")
    if not isinstance(entries, dict):
        raise ConfigError(f"{file} must hold models as `name: {{target: folder or hub id}}`")
    for name in entries:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise ConfigError(f"{file}: {name!r} is no name for a model; write it in quotes")
    return entries


def _settings(file: Path, name: str, values: Any) -> dict[str, tuple[str, Any]]:
    """An entry's settings: its key and value by what the flag is called in the code, so that two names of one meet."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: {name}: must hold settings such as `target: folder or hub id`, not {values!r}")
    known, found = _keys(_parser()), dict[str, tuple[str, Any]]()
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; they are {', '.join(known)}"
            raise ConfigError(f"{file}: {name}: {key!r} is not a setting of a model{hint}")
        field = known[key].dest
        if field in found:
            raise ConfigError(f"{file}: {name}: {found[field][0]} and {key} are the same; give one")
        found[field] = key, value
    return found


def _config(file: Path, name: str, settings: Mapping[str, tuple[str, Any]]) -> LoadConfig:
    if not settings.get("target", ("", None))[1]:
        raise ConfigError(f"{file}: {name}: has no target; add `target: folder or hub id`")
    parser = _parser()
    known = _keys(parser)
    try:
        arguments = [text for key, value in settings.values() for text in _arguments(key, value, known[key])]
        config = load_config_of(parser.parse_args(arguments))
    except EagleError as e:
        raise ConfigError(f"{file}: {name}: {e}") from e
    speculation = config.speculation
    for key, place in (("target", config.target), ("head", speculation.head), ("draft-model", speculation.draft_model)):
        if place is not None and place not in _KEPT_NAMES and _is_missing(place):
            raise ConfigError(f"{file}: {name}: {key} {place} is no folder here; correct the path, or give a hub id")
    return config


def _is_missing(place: str | Path) -> bool:
    """Whether a name can only be a folder's, and there is none."""
    return not Path(place).expanduser().is_dir() and hub.hub_id(place) is None


def _arguments(key: str, value: Any, action: argparse.Action) -> Iterator[str]:
    """A setting as it would be written in a command. Raises ConfigError for a value of a kind that no flag has."""
    if value is None:
        return  # as if it were not there, where `default` has it
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, not {value!r}")
        if isinstance(action, argparse.BooleanOptionalAction):
            yield f"--{key}" if value else f"--no-{key}"
        elif value:
            yield f"--{key}"
        return
    several = isinstance(action.default, list)
    for each in value if several and isinstance(value, list) else [value]:
        if action.metavar == "JSON" and isinstance(each, dict):
            each = json.dumps(each)
        if isinstance(each, bool | list | dict):
            raise ConfigError(f"{key} cannot be {each!r}; give {'texts' if several else 'one text or number'}")
        yield f"--{key}={each}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_model_arguments(parser)
    return parser


def _keys(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags by their names without dashes."""
    names: dict[str, argparse.Action] = {}
    for action in parser._actions:
        negated = isinstance(action, argparse.BooleanOptionalAction)
        for flag in action.option_strings[: 1 if negated else None]:
            names[flag.removeprefix("--")] = action
    return names
