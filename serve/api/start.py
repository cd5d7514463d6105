"""Starts a server, or compares texts with and without drafts."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_writable, disk_bytes, name_of
from eagle_mlx.memory import free_memory, gb, models_bytes

from .. import log
from ..speculation import bytes_of
from .guard import is_loopback
from .loader import check, load, several
from .models import Models, read_models
from .options import LoadConfig, ServeOptions, Settings
from .server import Server, create_app, listen
from .service import ModelSource


def run(options: ServeOptions) -> int:
    """Serve, or with --check compare texts and return 1 if they differ. Raises EagleError."""
    configs, settings = configs_of(options), options.server
    if settings.api_key is None:
        settings = replace(settings, api_key=os.environ.get("EAGLE_API_KEY"))
    for config in configs.values():
        for folder in filter(None, (config.learning.folder, config.prefix_cache_dir)):
            check_writable(folder.expanduser())
        if config.prefix_cache_dir is not None:
            size = disk_bytes(folder := config.prefix_cache_dir.expanduser())
            if (limit := config.prefix_disk_gb or 0) * 1e9 > size:
                raise ConfigError(f"--prefix-disk-gb {limit:g} is more than the disk of {folder} has, {gb(size)}")
    for config in configs.values():
        config.loading.follow(config.name)
    if options.check:
        passed = [_checked(name, config) for name, config in configs.items()]
        return 0 if all(passed) else 1
    _serve(configs, settings, options)
    return 0


def configs_of(options: ServeOptions) -> dict[str, LoadConfig]:
    """Return the configs by model name. Raises ConfigError if the file of models is invalid."""
    if options.models is None:
        name = None if options.model.target is None else str(options.model.target)
        return {options.served_model_name or served_name(name): options.model.resolved()}
    configs = read_models(options.models)
    if sharded := [name for name, config in configs.items() if config.loading.shard != "none"]:
        raise ConfigError(f"{options.models}: {sharded[0]} has a shard; serve that model alone, with --target")
    return configs


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
        loaded.target.close()


_SWITCH_SECONDS = 0.001
"""Seconds that the engine and the event loop wait for a thread that parses or renders; Python's default is 0.005."""


def _serve(configs: dict[str, LoadConfig], settings: Settings, options: ServeOptions) -> None:
    gc.freeze()  # imported modules stay, so collections need not visit them while others wait
    sys.setswitchinterval(_SWITCH_SECONDS)
    sock = listen(options.host, options.port)
    with sock:
        is_local = is_loopback(sock.getsockname()[0])
        settings = replace(settings, hosts=hosts_of(sock, options.allowed_host), is_local=is_local)
        models = _models(configs, settings, options)
        if settings.api_key is None and not is_local:
            say(f"note: anyone who can reach {options.host} can use this server; to prevent that, set --api-key")
        server = Server(create_app(models), say)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as after nohup
            signal.signal(signal.SIGHUP, server.handle_exit)
        server.run(sockets=[sock])
        if models.failure is not None:
            raise models.failure


def _models(configs: dict[str, LoadConfig], settings: Settings, options: ServeOptions) -> Models:
    """Return the single model, loaded at startup, or the models of a file, loaded on demand."""
    if options.models is None:
        ((name, config),) = configs.items()
        say(f"model: {name}")
        return Models(settings, [ModelSource(name, lambda: load(config, say), config.max_batch)], at_start=True)
    nbytes = bytes_of(options.memory_gb) or models_bytes(free_memory())
    sources = several(configs, nbytes, log.info)
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
