"""The command `eagle-serve`: serves one or several models over OpenAI's API."""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from eagle_mlx.command import exit_code, read
from eagle_mlx.errors import ConfigError
from eagle_mlx.memory import gb
from eagle_mlx.setting import ABOVE_0, AT_LEAST_0, FINITE, GIGABYTES, SECONDS_OR_0, Group, flag, setting, settings_of

from ..options import bytes_of
from .guard import check_trusted, is_loopback
from .limits import Limits
from .loader import LoadConfig, budget, check, load, several, single
from .models import Models, read_models
from .server import Server, create_app, listen, run, set_up_log
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


@dataclass(frozen=True)
class PlaceOptions(Group):
    """Where the server listens, and for whom."""

    host: str = setting("127.0.0.1", "address to listen at; the default is this machine", metavar="HOST")
    port: int = setting(8000, "0 takes a free one")
    api_key: str | None = setting(
        None,
        "what clients must send; several have spaces between them, and each has a prefix cache of its own "
        "(default: EAGLE_API_KEY, else nothing)",
        metavar="KEY",
    )
    cache_report: bool = setting(
        Settings.cache_report,
        "tell clients how many tokens of a prompt came from the prefix cache; without, the counts read 0",
    )
    served_model_name: str | None = setting(None, "default: the folder's name or the hub id")
    allow_origin: tuple[str, ...] = setting((), "let web pages from there in; repeatable", metavar="URL", repeat=True)
    allowed_host: tuple[str, ...] = setting(
        (),
        "a name of this server in requests, beside localhost; repeatable (default: any, at 127.0.0.1 none)",
        metavar="NAME",
        repeat=True,
    )
    forwarded_allow_ips: str = setting(
        "",
        "proxies whose X-Forwarded-For names the client: addresses or networks with commas between them, or * for any "
        "(default: none)",
        metavar="LIST",
    )
    ignore_unknown_fields: bool = setting(
        False, "drop fields that are not known, as vLLM and llama.cpp do, where they are refused otherwise"
    )


@dataclass(frozen=True)
class LimitOptions(Group):
    """What bounds requests, and all models together."""

    max_queue: int = setting(Limits.queue, "requests that wait for a model; beyond them 429", AT_LEAST_0)
    max_body_mb: float = setting(Limits.body_bytes / (1 << 20), "of a request; beyond it 413", FINITE, metavar="MB")
    request_seconds: float | None = setting(
        None,
        "for a request, waiting included; then it ends with what it has (default: as long as it takes)",
        ABOVE_0,
        metavar="S",
    )
    memory_gb: float | None = setting(
        None,
        "with --models: weights, keys and values of all that are loaded (default: four fifths of what is free)",
        GIGABYTES,
        metavar="GB",
    )
    drain_seconds: float = setting(Settings.drain_seconds, "to finish at the end", SECONDS_OR_0, metavar="S")


@dataclass(frozen=True)
class ServeOptions(Group):
    """A server: its models, its address, and its limits."""

    check: bool = setting(False, "decode 16 tokens with and without drafts, compare, end")
    models: Path | None = setting(
        None, "serve several models, which this YAML file names; see below for an example", metavar="FILE"
    )
    place: PlaceOptions = field(default_factory=PlaceOptions)
    model: LoadConfig = field(default_factory=LoadConfig)
    limits: LimitOptions = field(default_factory=LimitOptions)

    def _check(self) -> None:
        if self.models is None and self.limits.memory_gb is not None:
            raise ConfigError("--memory-gb is for several models, with --models; a single one is bounded by --kv-gb")
        if self.models is None:
            return
        of_a_model = [(name, known.default) for name, known in settings_of(LoadConfig).items()]
        for name, default in [*of_a_model, ("served_model_name", None)]:
            if self.value(name) != default:
                raise ConfigError(
                    f"{flag(name)} belongs to a model: write it in {self.models}, under its name or `default`"
                )

    def configs(self) -> dict[str, LoadConfig]:
        """Return the configs by model name. Raises ConfigError if the file of models is invalid."""
        if self.models is None:
            name = None if self.model.target is None else str(self.model.target)
            return {self.place.served_model_name or served_name(name): self.model.resolved()}
        configs = read_models(self.models)
        if sharded := [name for name, config in configs.items() if config.loading.shard != "none"]:
            raise ConfigError(f"{self.models}: {sharded[0]} has a shard, which is for a model that is served alone")
        return configs

    def settings(self) -> Settings:
        """Return the settings that all models share. Raises ConfigError for an invalid key or proxy list."""
        place, limits = self.place, self.limits
        key = place.api_key if place.api_key is not None else os.environ.get("EAGLE_API_KEY")
        if key is not None and not (key.split() and key.isascii() and key.isprintable()):
            raise ConfigError(
                "--api-key (or EAGLE_API_KEY) must be printable ASCII and not empty; spaces stand between several keys"
            )
        seconds = math.inf if limits.request_seconds is None else limits.request_seconds
        body = int(limits.max_body_mb * (1 << 20))
        return Settings(
            limits=Limits(body, limits.max_queue, request_seconds=seconds),
            api_key=key,
            cache_report=place.cache_report,
            origins=place.allow_origin,
            forwarded_allow_ips=check_trusted(place.forwarded_allow_ips),
            ignore_unknown_fields=place.ignore_unknown_fields,
            drain_seconds=limits.drain_seconds,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-serve. Returns the exit status: 0, 1 if --check fails, or 2 for an error."""
    about = "Serve a model over HTTP, in OpenAI's shapes, with speculative decoding: the same text, sooner."
    return exit_code(lambda: _run(read(ServeOptions, argv, "eagle-serve", about, EPILOG)))


def _run(options: ServeOptions) -> int:
    configs, settings = options.configs(), options.settings()
    for config in configs.values():
        config.loading.follow(config.name)
    if options.check:
        passed = [_checked(name, config) for name, config in configs.items()]
        return 0 if all(passed) else 1
    _serve(configs, settings, options)
    return 0


def command() -> NoReturn:
    """Run eagle-serve as a process and exit with `main`'s status."""
    set_up_log()
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # After it can be joined, the engine's thread still releases MLX's compiled functions, which are Python objects.
    # That would abort an interpreter that is shutting down, so skip the shutdown.
    os._exit(status)


def say(text: str) -> None:
    """Print a line about startup. Later lines go to the log, with time and level."""
    print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Log a line about the running server."""
    logging.getLogger("eagle_mlx.serve").info("%s", text)


def _checked(name: str, config: LoadConfig) -> bool:
    gc.collect()  # free the previous model
    say(f"model: {name}")
    loaded = load(config, say)
    try:
        return check(loaded, say)
    finally:
        loaded.grammars.end()
        loaded.target.close()


def _serve(configs: dict[str, LoadConfig], settings: Settings, options: ServeOptions) -> None:
    sock = listen(options.place.host, options.place.port)
    with sock:
        is_local = is_loopback(sock.getsockname()[0])
        settings = replace(settings, hosts=hosts_of(sock, options.place.allowed_host), is_local=is_local)
        models = _models(configs, settings, options)
        if settings.api_key is None and not is_local:
            say(f"note: whoever reaches {options.place.host} can use this server; an --api-key would keep others out")
        run(Server(create_app(models), say, note), sock)


def _models(configs: dict[str, LoadConfig], settings: Settings, options: ServeOptions) -> Models:
    """Return the single model, loaded at startup, or the models of a file, loaded on demand."""
    if options.models is None:
        ((name, config),) = configs.items()
        say(f"model: {name}")

        def tell(text: str) -> None:  # the model may be unloaded and reloaded later
            (say if models.state == "starting" else note)(text)

        models = Models(settings, [single(name, config, tell)], at_start=True)
        return models
    nbytes = budget(bytes_of(options.limits.memory_gb))
    sources = several(configs, nbytes, note)
    say(f"models: {', '.join(configs)}; loaded when they are asked for, within {gb(nbytes)}")
    return Models(settings, sources, nbytes)


def hosts_of(sock: socket.socket, named: Sequence[str]) -> tuple[str, ...] | None:
    """Return the hosts to accept besides loopback ones; None, the default off the loopback, accepts any."""
    return tuple(named) if named or is_loopback(sock.getsockname()[0]) else None


def served_name(target: str | None) -> str:
    """Return a target's name for clients: a hub id unchanged, a folder's last part."""
    if target is None:
        return "embedded"
    return Path(target).resolve().name if Path(target).exists() else target


if __name__ == "__main__":
    command()
