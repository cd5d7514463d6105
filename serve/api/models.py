"""A server's models: reading the file that names them, loading on demand, and unloading the least recently used."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from operator import attrgetter
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import read_yaml
from eagle_mlx.memory import gb
from eagle_mlx.setting import flag, settings_of

from .. import log
from ..speculation import AUTO, NO_HEAD
from .errors import ApiError, shutting_down
from .limits import Pools
from .model import Loaded
from .options import LoadConfig, Settings
from .service import ModelSource, Service

ServerState = Literal["starting", "ready", "stuck", "draining"]


class Models:
    """A service per model, loaded one at a time within a limit of memory, and the threads for encoding."""

    def __init__(
        self, settings: Settings, sources: Sequence[ModelSource], nbytes: int | None = None, at_start: bool = False
    ):
        """nbytes: memory for all loaded models; None for no limit. at_start: load all at startup; end if one fails."""
        self.settings = settings
        self.services = {source.name: Service(settings, source) for source in sources}
        self.pools = Pools(settings.limits)
        self.draining = False
        self._nbytes, self._at_start = inf if nbytes is None else nbytes, at_start
        self._starting = set(self.services) if at_start else set()
        """Models that the server waits for before it is ready."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._taken: dict[str, int] = {}  # bytes of models that are loaded or loading
        self._checking = ThreadPoolExecutor(1, "checking")
        """One thread, because MLX keeps state for each thread that has used it."""
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()  # set when a model may have become idle
        for service in self.services.values():
            service.on_idle = self._room.set

    @property
    def state(self) -> ServerState:
        if self.draining or self._starting:
            return "draining" if self.draining else "starting"
        return "stuck" if any(service.watchdog.stuck for service in self.services.values()) else "ready"

    @property
    def idle(self) -> bool:
        return all(service.idle for service in self.services.values())

    @property
    def failure(self) -> BaseException | None:
        """The failure of a model that the server cannot run without."""
        for service in self.services.values() if self._at_start else ():
            # If a model is loaded again, the request that waits for it gets the error.
            is_again = service.state == "loading" and service.name not in self._starting
            if service.worker.failure is not None and not is_again:
                return service.worker.failure
        return None

    def start(self) -> None:
        for service in self.services.values():
            service.worker.start(asyncio.get_running_loop())
        for name in self._starting:
            self._begin(self.services[name])

    def stop(self) -> None:
        """End the threads, whatever they are doing."""
        self.pools.close()
        self._checking.shutdown(wait=False, cancel_futures=True)
        for service in self.services.values():
            service.worker.stop()
        for service in self.services.values():
            service.worker.join()  # not in a pool thread: work that hangs may hold all of them

    def check_open(self) -> None:
        """Raise ApiError 503 if the server takes no requests."""
        if self.draining:
            raise shutting_down()
        if self._starting:
            raise ApiError(503, "the model is being loaded", code="starting", headers={"Retry-After": "5"})

    def named(self, model: str | None) -> Service:
        """Return the model that a request names; a single one need not be named. Raises ApiError 400, 404 or 503."""
        self.check_open()
        return self.known(model)

    def known(self, model: str | None) -> Service:
        """Return a model as `named` does, even if the server takes no requests."""
        names = ", ".join(map(repr, self.services))
        if model is None and len(self.services) > 1:
            raise ApiError(400, f"name the model, because this server has several: {names}", "model")
        if model is not None and model not in self.services:
            message = f"model {model[:200]!r} is not served here; available: {names}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.services[model] if model is not None else next(iter(self.services.values()))

    async def loaded(self, service: Service) -> Loaded:
        """Wait for a model. Raises ApiError 500 if loading fails, 503 if there is no memory for it in time."""
        while (loaded := service.loaded) is None:
            await asyncio.shield(self._begin(service))
        return loaded

    async def unload(self, service: Service) -> None:
        """Unload a model. Raises ApiError 409 while it has requests, or if several machines share it."""
        if service.ranks > 1:
            problem = "runs on several machines, so it stays loaded; stop the server instead"
            raise ApiError(409, f"model {service.name!r} {problem}", "model", "model_shared")
        _check_idle(service)  # at once, although another load may wait for this model
        async with self._turn:
            _check_idle(service)
            await self._end(service)

    async def unload_unused(self) -> None:
        """Unload the models that had no request for `idle_unload_minutes`, once their heads have learned what there is.
        Call this regularly."""
        least = perf_counter() - 60 * (self.settings.idle_unload_minutes or inf)
        for service in self.services.values():
            async with self._turn:
                if service.loaded is not None and service.idle and service.last_used < least and not service.learns:
                    log.info("model %s is unloaded, because it was not used", service.name)
                    await self._end(service)

    def _begin(self, service: Service) -> asyncio.Task[None]:
        """Return the load in progress, or start one. It continues if a waiting request is canceled."""
        if service.name not in self._loading:
            loading = self._loading[service.name] = asyncio.create_task(self._load(service))
            loading.add_done_callback(lambda done: self._loading.pop(service.name))
            # Mark its error as retrieved, even if nobody waits.
            loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._loading[service.name]

    async def _load(self, service: Service) -> None:
        async with self._turn:
            await self._end(service)  # in case its engine has died
            service.state = "loading"
            try:
                # Its files show whether it cannot be loaded.
                needed = await asyncio.get_running_loop().run_in_executor(self._checking, service.source.nbytes)
                if needed > self._nbytes:
                    limit = f"all models together may use {gb(self._nbytes)} (--memory-gb)"
                    raise EagleError(f"it needs {gb(needed)}, but {limit}")
                await self._make_room(service, needed)
                self._taken[service.name] = needed
                await service.worker.load()
            except ApiError:
                service.state = "unloaded"
                raise
            except Exception as e:
                service.state = "failed"
                self._taken.pop(service.name, None)
                is_reported = service.name in self._starting and isinstance(e, EagleError)  # as the server ends
                if service.name not in self._starting:
                    service.worker.failure = None  # let the next request try again
                if not is_reported:
                    details = None if isinstance(e, EagleError) else e
                    log.error("model %s could not be loaded: %s", service.name, e, exc_info=details)
                # The reason may name folders of this machine, which clients should not see.
                message = f"model {service.name!r} could not be loaded; see the server's log"
                raise ApiError(500, message, code="model_not_loaded") from e
            service.state, service.last_used = "loaded", perf_counter()
            self._starting.discard(service.name)

    async def _make_room(self, service: Service, needed: int) -> None:
        """Unload the models idle longest until `needed` bytes are free. Raises ApiError 503 after `room_seconds`."""
        until = monotonic() + self.settings.limits.room_seconds
        while sum(self._taken.values()) + needed > self._nbytes:
            idle = [other for other in self.services.values() if other.state == "loaded" and other.idle]
            if idle:
                await self._end(min(idle, key=attrgetter("last_used")))
                continue
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), until - monotonic())
            except TimeoutError as e:
                message = f"there is no memory for model {service.name!r}: all loaded models have requests in progress"
                raise ApiError(503, message, code="no_room", headers={"Retry-After": "5"}) from e

    async def _end(self, service: Service) -> None:
        """Unload a model that has no requests; do nothing if it is not loaded."""
        if service.state != "loaded":
            return
        service.state = "unloading"
        await service.worker.unload()
        service.state = "unloaded"
        self._taken.pop(service.name, None)


def _check_idle(service: Service) -> None:
    if not service.idle:
        problem = "has requests in progress; unload it after they have finished"
        raise ApiError(409, f"model {service.name!r} {problem}", "model", "model_busy")


DEFAULT = "default"


def read_models(file: Path) -> dict[str, LoadConfig]:
    """Read the models of a file by name, without loading them. Raises ConfigError with file, entry and remedy."""
    entries = read_yaml(file, "file of models")
    if not isinstance(entries, dict):
        raise ConfigError(f"{file} must hold models as `name: {{target: folder or hub id}}`")
    for name in entries:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise ConfigError(f"{file}: {name!r} is not a model name; write it in quotes")
    settings = {name: _settings(file, name, values) for name, values in entries.items()}
    shared = settings.pop(DEFAULT, {})
    if not settings:
        raise ConfigError(f"{file} has no models; write one as `name: {{target: folder or hub id}}`")
    configs = {name: _config(file, name, {**shared, **own}) for name, own in settings.items()}
    learners: dict[Path, str] = {}
    for name, config in configs.items():
        if (folder := config.learning.folder) is not None:
            other = learners.setdefault(folder.expanduser().resolve(), name)
            if other != name:
                raise ConfigError(f"{file}: {name}: learn {folder} is the folder of {other}; name another")
    return configs


def _settings(file: Path, name: str, values: Any) -> dict[str, Any]:
    """Return an entry's settings under their names in code."""
    if not isinstance(values, dict | None):
        raise ConfigError(f"{file}: {name}: must hold settings such as `target: folder or hub id`, not {values!r}")
    names, keys, settings = _settings_by_key(), dict[str, str](), dict[str, Any]()
    for key, value in (values or {}).items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; they are {', '.join(names)}"
            raise ConfigError(f"{file}: {name}: {key!r} is not a setting of a model{hint}")
        setting, negated = names[key]
        if setting in keys:
            raise ConfigError(f"{file}: {name}: {keys[setting]} and {key} are the same setting; keep one")
        keys[setting] = key
        if negated and not isinstance(value, bool | None):
            raise ConfigError(f"{file}: {name}: {key} must be true or false, not {value!r}")
        settings[setting] = not value if negated and value is not None else value
    return settings


def _config(file: Path, name: str, settings: Mapping[str, Any]) -> LoadConfig:
    if not settings.get("target"):
        raise ConfigError(f"{file}: {name}: has no target; add `target: folder or hub id`")
    try:  # drop None, so that an entry can unset a setting of `default`
        config = LoadConfig.of(**{key: value for key, value in settings.items() if value is not None}).resolved()
    except EagleError as e:
        raise ConfigError(f"{file}: {name}: {e}") from e
    speculation = config.speculation
    for key, place in (("target", config.name), ("head", speculation.head), ("draft-model", speculation.draft_model)):
        if place in (None, AUTO, NO_HEAD) or Path(place).expanduser().is_dir() or hub.hub_id(place) is not None:
            continue
        raise ConfigError(f"{file}: {name}: {key} {place} is not a folder; correct the path, or give a hub id")
    return config


def _settings_by_key() -> Mapping[str, tuple[str, bool]]:
    """Map each key to its setting, and whether the key negates it (`no-prior`)."""
    declared = settings_of(LoadConfig).values()
    keys = {flag(name)[2:]: (setting.name, False) for setting in declared for name in (setting.name, *setting.also)}
    return keys | {f"no-{flag(setting.name)[2:]}": (setting.name, True) for setting in declared if setting.type is bool}
