"""Settings of eagle-serve. They need no package of the extra, so that `--help` works without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Literal, Self

from eagle_mlx.catalog import embedded
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import LEAST_CHUNK, PREFILL_MS
from eagle_mlx.setting import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Group, Limit, between, flag, setting, settings_of
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.vision.images import ImageLimits

from ..learning.options import LearnOptions
from ..speculation import IN_MEMORY, TARGET_HELP, THINKING, MemoryOptions, Speculation


@dataclass(frozen=True)
class Limits(Group):
    """Limits of requests."""

    queue: int = setting(128, "requests that may wait for a model; more are refused with 429", AT_LEAST_0, "max_queue")
    body_mb: float = setting(
        32.0,  # as in Anthropic's API; a turn of an agent sends all screenshots again
        "size limit of a request; larger ones get 413",
        Limit(lambda size: size >= 0.001, "must be at least 0.001, not {}"),
        "max_body_mb",
        "MB",
    )
    request_seconds: float | None = setting(
        None,
        "time limit of a request, waiting included; it then ends with its text so far (default: none)",
        ABOVE_0,
        metavar="S",
    )
    n: int = 16
    prompts: int = 64  # prompts per completions request
    stops: int = 16
    stop_length: int = 256  # characters of a stop string
    containers: int = 20_000
    """Objects and lists of a body; 5,000 tool calls with their results have so many. Parsing them takes 0.05 s."""
    long_bytes: int = 1 << 16
    """Requests of at least this size are long: those of a client are read and encoded one at a time, and delay no short
    ones."""
    long_containers: int = 1000
    """Requests with more objects and lists are long, too. The event loop reads fewer in 5 ms."""
    threads: int = 4  # for each kind of prompt: short, long, or with a schema, whose compilation may keep a core busy
    responses: int = 1000  # responses stored for `previous_response_id`, for each API key
    response_bytes: int = 64 << 20
    """Memory of stored responses, for each API key: twice the default limit of a body."""
    connections: int = 1000
    """Open connections. mlx-lm allows the process at least 2048 files; half are left for other uses."""
    head_seconds: float = 60.0  # time to receive a request's head, as nginx's client_header_timeout
    body_seconds: float = 60.0  # time to receive the whole body
    send_seconds: float = 60.0  # how long a client may read nothing of its answer, as nginx's send_timeout
    keep_alive_seconds: float = 15.0
    """Interval between events of a stream that has nothing to tell. The HTML standard advises 15 seconds (9.2.7)."""
    room_seconds: float = 60.0  # how long a model waits for others to become idle, as nginx's proxy_read_timeout

    @property
    def body_bytes(self) -> int:
        return int(self.body_mb * (1 << 20))


@dataclass(frozen=True)
class Settings(Group):
    """A server's treatment of requests, and who may send them."""

    api_key: str | None = setting(
        None,
        "keys that clients may send, separated by spaces; each has its own prefix cache, and only the first may use "
        "/admin (default: EAGLE_API_KEY, or no key)",
        metavar="KEY",
    )
    cache_report: bool = setting(
        True, "report how many prompt tokens came from the prefix cache; otherwise the counts are 0"
    )
    allow_origin: tuple[str, ...] = setting((), "web origin to allow (CORS); repeatable", metavar="URL", repeat=True)
    forwarded_allow_ips: str = setting(
        "",
        "proxies to trust for X-Forwarded-For: addresses or networks, separated by commas, or * (default: none)",
        metavar="LIST",
    )
    stuck_seconds: float = setting(
        120.0,
        "seconds that a step, or work between steps, may take, ten times as many to read prompts; after that, /health "
        "says stuck and the log has the stacks of all threads; 0 for no limit",
        AT_LEAST_0,
        metavar="S",
    )
    exit_when_stuck: bool = setting(False, "exit with 1 if a step is stuck; a supervisor then restarts the server")
    idle_unload_minutes: float | None = setting(
        None,
        "unload a model that had no request for so long; the next one loads it again (default: never)",
        ABOVE_0,
        metavar="N",
    )
    stream_per_token: bool = setting(
        False, "stream an event for each token, for clients that count events; otherwise one holds a round's tokens"
    )
    log_requests: bool = setting(True, "log one line per request: tokens, accepted drafts and seconds, never text")
    strict_fields: bool = setting(
        False, "refuse unknown request fields; otherwise they are ignored, and named in the header x-ignored-fields"
    )
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = setting(30.0, "seconds that requests get to finish at shutdown", AT_LEAST_0, metavar="S")
    hosts: tuple[str, ...] | None = None  # accepted host names besides loopback ones; None accepts any
    is_local: bool = True  # whether only this machine can connect

    def _check(self) -> None:
        key = self.api_key
        if key is not None and not (key.split() and key.isascii() and key.isprintable()):
            raise ConfigError(
                "--api-key (or EAGLE_API_KEY) must be printable ASCII and not empty; separate several keys by spaces"
            )
        for proxy in map(str.strip, self.forwarded_allow_ips.split(",")):
            try:
                if proxy not in ("", "*"):
                    ip_network(proxy)
            except ValueError as e:
                remedy = "give addresses or networks, separated by commas, or *"
                raise ConfigError(f"--forwarded-allow-ips: {e}; {remedy}") from e
        if self.exit_when_stuck and not self.stuck_seconds:
            raise ConfigError("--exit-when-stuck needs a limit; set --stuck-seconds above 0")


@dataclass(frozen=True)
class LoadConfig(Group):
    """A model to serve, and how much of it may run at once."""

    target: str | Path | None = setting(None, TARGET_HELP, metavar="MODEL")
    speculation: Speculation = field(default_factory=Speculation)
    max_batch: int = setting(8, "requests that decode at once", AT_LEAST_1)
    max_context: int | None = setting(
        None,
        "maximum tokens of prompt and answer together (default: the model's limit)",
        Limit(lambda tokens: tokens >= 2, "must hold a prompt and an answer, at least 2; got {}"),
    )
    prefill_ms: float = setting(
        PREFILL_MS,
        f"milliseconds that a prefill step may delay decoding; it reads at least {LEAST_CHUNK} tokens",
        ABOVE_0,
        metavar="MS",
    )
    prefix_cache_gb: float | None = setting(
        None,
        "part of --kv-gb for the prefix cache (default: a quarter of the memory left after the weights)",
        Limit(
            lambda gigabytes: gigabytes == 0 or IN_MEMORY.holds(gigabytes),
            "must be at least 0 and at most this machine's memory, not {} GB",
        ),
        metavar="GB",
    )
    prefix_cache_dir: Path | None = setting(None, "folder that keeps the prefix cache across restarts", metavar="DIR")
    prefix_disk_gb: float | None = setting(
        None,
        "size limit of that folder (default: a tenth of the disk, at most half of its free space)",
        ABOVE_0,
        metavar="GB",
    )
    kv_bits: Literal[4, 8] | None = setting(None, "quantize the KV cache to this many bits")
    thinking_budget: int | None = setting(None, f"{THINKING}; a request may set another", AT_LEAST_0)
    images: ImageLimits = field(default_factory=ImageLimits)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    learning: LearnOptions = field(default_factory=LearnOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)

    def _check(self) -> None:
        if self.prefix_cache_dir is not None and self.prefix_cache_gb == 0:
            raise ConfigError(
                "--prefix-cache-dir stores the prefix cache, but --prefix-cache-gb 0 disables it; remove one of them"
            )
        if self.prefix_cache_dir is not None and self.loading.shard != "none":
            raise ConfigError(
                "--prefix-cache-dir cannot be used with --shard, because a rank has only part of the cache"
            )
        if self.learning.folder is not None and self.loading.shard != "none":
            raise ConfigError("--learn cannot be used with --shard, because a rank has only part of the target")
        if self.prefix_disk_gb is not None and self.prefix_cache_dir is None:
            raise ConfigError("--prefix-disk-gb limits the size of --prefix-cache-dir; give that folder too")
        if (part := self.prefix_cache_gb or 0) > (whole := self.memory.kv_gb or math.inf):
            raise ConfigError(f"--prefix-cache-gb {part:g} is a part of --kv-gb, which is only {whole:g}")

    def resolved(self) -> Self:
        """Return this config with the default target and head filled in."""
        target, speculation = self.speculation.for_target(None if self.target is None else str(self.target))
        return replace(self, target=target, speculation=speculation)

    @property
    def name(self) -> str | Path:
        return embedded("target") if self.target is None else self.target


@dataclass(frozen=True)
class ServeOptions(Group):
    """The user's choices: the models, the address to listen at, and the settings of server and model."""

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
    host: str = setting("127.0.0.1", "address to listen at; the default accepts only this machine", metavar="HOST")
    port: int = setting(8000, "port to listen at; 0 chooses a free one", between(0, 65535))
    served_model_name: str | None = setting(None, "model name for clients (default: the folder's name or the hub id)")
    allowed_host: tuple[str, ...] = setting(
        (),
        "host name to accept besides localhost; repeatable (default: none if --host is local, otherwise any)",
        metavar="NAME",
        repeat=True,
    )
    server: Settings = field(default_factory=Settings)
    model: LoadConfig = field(default_factory=LoadConfig)

    def _check(self) -> None:
        if self.server.idle_unload_minutes and self.model.loading.shard != "none":
            raise ConfigError("--idle-unload-minutes: a model with --shard stays loaded; leave out one of them")
        if self.models is None:
            if self.memory_gb is not None:
                raise ConfigError("--memory-gb is for several models, with --models; for a single model use --kv-gb")
            return
        of_a_model = {name: declared.default for name, declared in settings_of(LoadConfig).items()}
        for name, default in {**of_a_model, "served_model_name": None}.items():
            if self.value(name) != default:
                raise ConfigError(
                    f"{flag(name)} is a setting of a model: write it in {self.models}, under its name or `default`"
                )
