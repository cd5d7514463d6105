"""Settings for all tests: no network, no windows, the fast BLAS before MLX, and one BLAS thread and core per worker."""

from __future__ import annotations

import gc
import os
import ssl
import sys
from contextlib import suppress
from functools import cache

from tests.full import FULL, some

os.environ.update(
    EAGLE_MLX_CACHE=os.devnull,  # no test reads another's cache
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    MPLBACKEND="Agg",
)
if not FULL:
    os.environ["MLX_DISABLE_COMPILE"] = "1"  # on a CPU, g++ takes a second for each of some 170 kernels
if FULL or {"EAGLE_FUZZ_ROUNDS", "KILLS", "SCHEMA_CASES", "SOAK_SECONDS"} & os.environ.keys():
    os.environ.setdefault("PYTEST_TIMEOUT", "3600")  # tests with larger settings may take longer (pyproject.toml)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A worker's threads take turns, so a second core does not help; moving between cores cost an eighth.
    if hasattr(os, "sched_setaffinity"):
        cores, number = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(cores):
            os.sched_setaffinity(0, {cores[number % len(cores)]})
# MLX hands each operation to another thread on a CPU, and operations of tiny models are shorter than the switch. With
# SCHED_BATCH, a waking thread waits until the other pauses, which saves a fifth of the suite's time.
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from eagle_mlx.cpu import use_shortcuts
from tests.shortcuts import without_shortcuts

if TYPE_CHECKING:
    import mlx.core as mx

    from tests.hub_server import Hub

# Each client of httpx would read all certificates, which takes 20 ms. Servers in tests have none.
ssl.create_default_context = cache(ssl.create_default_context)

# The same code gets the same examples; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=some(100))
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")

if not FULL:  # no test cuts the power, and waiting for the disk took a tenth of some files' time
    os.fsync = lambda descriptor: None  # type: ignore[assignment]

gc.disable()  # until all tests are collected: imports are never freed, and scanning them took a fifth of that time


def pytest_collection_finish() -> None:
    """Freeze half a million objects of modules and tests, so that a stopping server scans only its own garbage."""
    gc.freeze()
    gc.enable()
    if FULL:
        return
    for name, remember in (
        ("eagle_mlx.data_pipelines.sources.stdlib", _shorten_library),
        ("mlx_lm.utils", _remember_tokenizers),
    ):
        if name in sys.modules:
            remember(sys.modules[name])


def _shorten_library(library: ModuleType) -> None:
    """Read 60 files of each split of Python's library, and each once: every run with `builtin:python` would take two
    seconds for all."""
    files, parse = library.iter_files, library.functions_of
    library.iter_files = cache(lambda split: list(islice(files(split), 60)))
    library.functions_of = cache(lambda file: list(parse(file)))


def _remember_tokenizers(utils: ModuleType) -> None:
    """Copy tokenizers that were read from the same files, in a twentieth of the time."""
    from tests.fakes import copied

    load, loaded = utils._load_tokenizer, dict[Any, Any]()

    def remembered(folder: Path, *settings: Any, **more: Any) -> Any:
        files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".jinja", ".model", ".txt", ".py"))
        contents = [(file.name, blake2b(file.read_bytes()).digest()) for file in files if file.is_file()]
        key = repr((contents, settings, more))
        if key not in loaded:
            loaded[key] = load(folder, *settings, **more)
            if len(loaded) > 16:
                del loaded[next(iter(loaded))]
        tokenizer = copied(loaded[key])
        tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
        return tokenizer

    utils._load_tokenizer = remembered


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_behind() -> Iterator[None]:
    """Collect a module's garbage at its end, such as engines; what stays is never scanned again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _short_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands try a head on fewer tokens, and measure one step before a run, unless in full or if that is tested.

    The tests' heads are random, so a trial of 64 tokens takes 64 rounds, and most of a command's time. Measuring takes
    a third of a tiny run.
    """
    for module, name, value, tests in (
        ("eagle_mlx.head_check", "TOKENS", 8, "test_head_check.py"),
        ("eagle_mlx.train.plan.memory", "LONG", 0.0, "test_bound_and_probe.py"),
    ):
        if module in sys.modules and not FULL and request.path.name != tests:
            monkeypatch.setattr(sys.modules[module], name, value)


@pytest.fixture(autouse=True)
def _repeatable_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the same noise in every run, so that no test of a distribution fails by chance."""
    if not FULL:
        monkeypatch.setattr("secrets.randbits", Random(0).getrandbits)


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    """Run the test without the CPU's shortcuts, as on a GPU."""
    with without_shortcuts():
        yield


@pytest.fixture
def positions_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many positions, over all rows, each forward of a target reads."""
    from eagle_mlx.target import Forward, Target

    counts, forward = list[int](), Target.forward

    def counting(target: Target, tokens: mx.array, *args: Any, **more: Any) -> Forward:
        counts.append(tokens.size)
        return forward(target, tokens, *args, **more)

    monkeypatch.setattr(Target, "forward", counting)
    return counts


@pytest.fixture
def with_shortcuts() -> None:
    """Skip the test unless the CPU's shortcuts are in use."""
    if not use_shortcuts():
        pytest.skip("on a GPU, or with EAGLE_MLX_CPU_SHORTCUTS=0")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let MLX compile functions, here and in child processes; in full, it does so in every test."""
    import mlx.core as mx

    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    mx.enable_compile()
    yield
    if not FULL:
        mx.disable_compile()


@pytest.fixture(scope="module")
def hub_running() -> Iterator[Hub]:
    from tests import hub_server

    with hub_server.serving() as running:
        yield running


@pytest.fixture
def online(hub_running: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Provide an empty, working stand-in of the hub."""
    from tests import hub_server

    hub_server.use(monkeypatch, hub_running.base, tmp_path / "huggingface")
    hub_running.clear()
    return hub_running
