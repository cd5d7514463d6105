"""The command `eagle-serve`: a model, or several, behind an OpenAI endpoint."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.memory import gb

from ..memory import bytes_of
from .app import create_app
from .guard import check_trusted, is_loopback
from .limits import Limits
from .loader import LoadConfig, budget, check, load, several, single
from .models import Models
from .options import add_model_arguments, load_config_of, read_models
from .server import Server, listen, run, set_up_log
from .service import Settings

EPILOG = """\
examples:
  eagle-serve                                                 the embedded target and head, at http://127.0.0.1:8000
  eagle-serve --target Qwen3-4B-4bit                          a model, and the head that is found for it
  eagle-serve --target Qwen3-4B-4bit --head user/head         a model and its EAGLE head
  eagle-serve --target Qwen3-4B-4bit --spec-decode ngram      no second model: drafts come from the text so far
  eagle-serve --target Qwen3-4B-4bit --head user/head --check does speculation leave the text alone? 0 says yes
  eagle-serve --models models.yaml                            several models, each loaded when it is asked for
  EAGLE_API_KEY=secret eagle-serve --host 0.0.0.0             for others too, who must know the key

then, with any OpenAI client:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Write a haiku."}], "stream": true}'
  OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

models.yaml has a name for each model, and under it what its flags would say, without their dashes:
  default: {max-batch: 4}                                     # what all models share
  small: {target: Qwen3-0.6B-4bit, spec-decode: ngram}
  large: {target: Qwen3-4B-4bit, head: user/head, kv-gb: 4}
A request names its model in "model". Where memory is short, the one that was idle for longest is unloaded. POST
/admin/load and /admin/unload, with {"model": "small"}, do so at once.

A request can switch speculation off with "spec_decode": "none", or bound it with "num_speculative_tokens". /health
says starting, ready or draining; /metrics is for Prometheus. SIGTERM lets requests under way finish, then ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-serve; returns the exit status: 0, 1 where --check fails, 2 for an error."""
    args = _parser().parse_args(argv)
    try:
        configs, settings = _configs(args), _settings(args)
        for config in configs.values():
            config.options.follow(config.target)
        if args.check:
            passed = [_checked(name, config) for name, config in configs.items()]
            return 0 if all(passed) else 1
        _serve(configs, settings, args)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def command() -> NoReturn:
    """Run eagle-serve as a process, which ends with `main`'s exit status."""
    set_up_log()
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # When the engine's thread ends it gives up MLX's compiled functions, which are Python objects. That comes after it
    # can be joined, and would abort an interpreter that is being taken down: so none is taken down.
    os._exit(status)


def say(text: str) -> None:
    """Print a line about the start of the server. What comes after it goes to the log, with time and level."""
    print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Log a line about the running server."""
    logging.getLogger("eagle_mlx.serve").info("%s", text)


def _checked(name: str, config: LoadConfig) -> bool:
    gc.collect()  # the model before this one
    say(f"model: {name}")
    loaded = load(config, say)
    try:
        return check(loaded, say)
    finally:
        loaded.grammars.end()
        loaded.target.close()


def _serve(configs: dict[str, LoadConfig], settings: Settings, args: argparse.Namespace) -> None:
    sock = listen(args.host, args.port)
    with sock:
        is_local = is_loopback(sock.getsockname()[0])
        settings = replace(settings, hosts=_hosts(sock, args.allowed_host), is_local=is_local)
        models = _models(configs, settings, args)
        if settings.api_key is None and not is_local:
            say(f"note: whoever reaches {args.host} can use this server; an --api-key would keep others out")
        run(Server(create_app(models), say, note), sock)


def _models(configs: dict[str, LoadConfig], settings: Settings, args: argparse.Namespace) -> Models:
    """The one model, loaded at the start, or those of a file, loaded when they are asked for."""
    if args.models is None:
        ((name, config),) = configs.items()
        say(f"model: {name}")

        def tell(text: str) -> None:  # later, the model may be unloaded by hand, and loaded again
            (say if models.state == "starting" else note)(text)

        models = Models(settings, [single(name, config, tell)], at_start=True)
        return models
    nbytes = budget(bytes_of("--memory-gb", args.memory_gb))
    sources = several(configs, nbytes, note)
    say(f"models: {', '.join(configs)}; loaded when they are asked for, within {gb(nbytes)}")
    return Models(settings, sources, nbytes)


def _hosts(sock: socket.socket, named: Sequence[str]) -> tuple[str, ...] | None:
    """The hosts to serve: on a loopback address only those of this machine and those named, else any or those named."""
    return tuple(named) if named or is_loopback(sock.getsockname()[0]) else None


def _configs(args: argparse.Namespace) -> dict[str, LoadConfig]:
    """What is served, by name. Raises ConfigError for flags that have no meaning beside --models, or without it."""
    if args.models is None:
        if args.memory_gb is not None:
            raise ConfigError("--memory-gb is for several models, with --models; a single one is bounded by --kv-gb")
        return {args.served_model_name or served_name(args.target): load_config_of(args)}
    of_a_model = argparse.ArgumentParser(add_help=False)
    add_model_arguments(of_a_model)
    of_a_model.add_argument("--served-model-name")
    defaults = vars(of_a_model.parse_args([]))
    if given := [field for field, default in defaults.items() if getattr(args, field) != default]:
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{flag} belongs to a model: write it in {args.models}, under its name or `default`")
    configs = read_models(Path(args.models))
    if sharded := [name for name, config in configs.items() if config.options.shard != "none"]:
        raise ConfigError(f"{args.models}: {sharded[0]} has a shard, which is for a model that is served alone")
    return configs


def _settings(args: argparse.Namespace) -> Settings:
    if not (math.isfinite(args.drain_seconds) and args.drain_seconds >= 0):
        raise ConfigError(f"--drain-seconds must be at least 0; got {args.drain_seconds}")
    if not math.isfinite(args.max_body_mb):
        raise ConfigError(f"--max-body-mb must be a number; got {args.max_body_mb}")
    key = args.api_key if args.api_key is not None else os.environ.get("EAGLE_API_KEY")
    if key is not None and not (key.split() and key.isascii() and key.isprintable()):
        raise ConfigError(
            "--api-key (or EAGLE_API_KEY) must be printable ASCII and not empty; spaces stand between several keys"
        )
    return Settings(
        limits=Limits(int(args.max_body_mb * (1 << 20)), args.max_queue, request_seconds=args.request_seconds),
        api_key=key,
        cache_report=not args.no_cache_report,
        origins=tuple(args.allow_origin),
        forwarded_allow_ips=check_trusted(args.forwarded_allow_ips),
        ignore_unknown_fields=args.ignore_unknown_fields,
        drain_seconds=args.drain_seconds,
    )


def served_name(target: str | None) -> str:
    """The name of a target for clients: a hub id as it is, a folder by its last part."""
    if target is None:
        return "embedded"
    return Path(target).resolve().name if Path(target).exists() else target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle-serve",
        description="Serve a model over HTTP, in OpenAI's shapes, with speculative decoding: the same text, sooner.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="decode 16 tokens with and without drafts, compare, end")
    parser.add_argument(
        "--models", metavar="FILE", help="serve several models, which this YAML file names; see below for an example"
    )
    where = parser.add_argument_group("where, and for whom")
    where.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1, this machine)")
    where.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    where.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send; several have spaces between them, and each has a prefix cache of its own "
        "(default: EAGLE_API_KEY, else nothing)",
    )
    where.add_argument(
        "--no-cache-report",
        action="store_true",
        help="do not tell clients how many tokens of a prompt came from the prefix cache: the counts read 0",
    )
    where.add_argument("--served-model-name", metavar="NAME", help="default: the folder's name or the hub id")
    where.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="let web pages from there in; repeatable"
    )
    where.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of this server in requests, beside localhost; repeatable (default: any, at 127.0.0.1 none)",
    )
    where.add_argument(
        "--forwarded-allow-ips",
        default="",
        metavar="LIST",
        help="proxies whose X-Forwarded-For names the client: addresses or networks with commas between them, or * for "
        "any (default: none)",
    )
    where.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="drop fields that are not known, as vLLM and llama.cpp do, where they are refused otherwise",
    )
    add_model_arguments(parser)
    _add_limits(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """What bounds requests, and all models together."""
    much = parser.add_argument_group("how much of the server")
    queue, drain = Limits.queue, Settings.drain_seconds
    body = Limits.body_bytes / (1 << 20)
    much.add_argument(
        "--max-queue",
        type=int,
        default=queue,
        metavar="N",
        help=f"requests that wait for a model; beyond them 429 (default {queue})",
    )
    much.add_argument(
        "--max-body-mb", type=float, default=body, metavar="MB", help=f"of a request; beyond it 413 (default {body:g})"
    )
    much.add_argument(
        "--request-seconds",
        type=float,
        default=Limits.request_seconds,
        metavar="S",
        help="for a request, waiting included; then it ends with what it has (default: as long as it takes)",
    )
    much.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="with --models: weights, keys and values of all that are loaded (default: four fifths of what is free)",
    )
    much.add_argument(
        "--drain-seconds", type=float, default=drain, metavar="S", help=f"to finish at the end (default {drain:g})"
    )


if __name__ == "__main__":
    command()
