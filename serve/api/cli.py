"""The command `eagle-serve`: serves one or several models over OpenAI's API."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_writable, name_of
from eagle_mlx.memory import free_memory, gb, models_bytes
from eagle_mlx.setting import Group, flag, setting, settings_of

from .. import launch
from ..speculation import IN_MEMORY, bytes_of
from .guard import is_loopback
from .loader import LoadConfig, check, load, several
from .models import Models, read_models
from .server import Server, create_app, listen
from .service import Settings, Source

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


@dataclass(frozen=True)
class ServeOptions(Group):
    """A server: its models, its address, and its limits."""

    check: bool = setting(False, "compare 16 tokens with and without drafts, and exit")
    models: Path | None = setting(
        None, "serve several models, listed in this YAML file; see the example below", metavar="FILE"
    )
    memory_gb: float | None = setting(
        None,
        "with --models: memory for weights and KV caches of all models (default: four fifths of what is free)",
        IN_MEMORY,
        metavar="GB",
    )
    place: Settings = field(default_factory=Settings)
    model: LoadConfig = field(default_factory=LoadConfig)

    def _check(self) -> None:
        if self.models is None:
            if self.memory_gb is not None:
                raise ConfigError("--memory-gb is for several models, with --models; for a single model use --kv-gb")
            return
        of_a_model = [(name, known.default) for name, known in settings_of(LoadConfig).items()]
        for name, default in [*of_a_model, ("served_model_name", None)]:
            if self.value(name) != default:
                raise ConfigError(
                    f"{flag(name)} is a setting of a model: write it in {self.models}, under its name or `default`"
                )

    def configs(self) -> dict[str, LoadConfig]:
        """Return the configs by model name. Raises ConfigError if the file of models is invalid."""
        if self.models is None:
            name = None if self.model.target is None else str(self.model.target)
            return {self.place.served_model_name or served_name(name): self.model.resolved()}
        configs = read_models(self.models)
        if sharded := [name for name, config in configs.items() if config.loading.shard != "none"]:
            raise ConfigError(f"{self.models}: {sharded[0]} has a shard; serve that model alone, with --target")
        return configs

    def settings(self) -> Settings:
        """Return the settings that all models share. Raises ConfigError for an invalid key."""
        key = self.place.api_key
        return replace(self.place, api_key=os.environ.get("EAGLE_API_KEY") if key is None else key)


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-serve. Returns the exit status: 0, 1 if --check fails, or 2 for an error."""
    given = arguments(argv)
    if given[:1] == ["launch"]:
        return launch.main(given[1:])
    about = "Serve a model over HTTP with OpenAI's API and speculative decoding: the same text, sooner."
    return exit_code(lambda: _run(read(ServeOptions, given, "eagle-serve", about, EPILOG)))


def _run(options: ServeOptions) -> int:
    configs, settings = options.configs(), options.settings()
    for config in configs.values():
        if config.prefix_cache_dir is not None:
            check_writable(config.prefix_cache_dir.expanduser())
    for config in configs.values():
        config.loading.follow(config.name)
    if options.check:
        passed = [_checked(name, config) for name, config in configs.items()]
        return 0 if all(passed) else 1
    _serve(configs, settings, options)
    return 0


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


def say(text: str) -> None:
    """Print a line about startup. Later lines go to the log, with time and level."""
    print(text, file=sys.stderr, flush=True)


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
            say(f"note: anyone who can reach {options.place.host} can use this server; to prevent that, set --api-key")
        server = Server(create_app(models), say)
        server.run(sockets=[sock])
        if models.failure is not None:
            raise models.failure


def _models(configs: dict[str, LoadConfig], settings: Settings, options: ServeOptions) -> Models:
    """Return the single model, loaded at startup, or the models of a file, loaded on demand."""
    if options.models is None:
        ((name, config),) = configs.items()
        say(f"model: {name}")
        return Models(settings, [Source(name, lambda: load(config, say), config.max_batch)], at_start=True)
    nbytes = bytes_of(options.memory_gb) or models_bytes(free_memory())
    sources = several(configs, nbytes, logging.getLogger("eagle_mlx.serve").info)
    say(f"models: {', '.join(configs)}; each is loaded on demand, within {gb(nbytes)}")
    return Models(settings, sources, nbytes)


def hosts_of(sock: socket.socket, named: Sequence[str]) -> tuple[str, ...] | None:
    """Return the hosts to accept besides loopback ones; None, the default off the loopback, accepts any."""
    return tuple(named) if named or is_loopback(sock.getsockname()[0]) else None


def served_name(target: str | None) -> str:
    """Return a target's name for clients: a hub id unchanged, a folder's last part, even if that is a link."""
    if target is None:
        return "embedded"
    return name_of(target) if Path(target).expanduser().exists() else target


if __name__ == "__main__":
    command()
