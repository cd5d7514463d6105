"""What holds for every test: no network, no windows, the fast BLAS before MLX, one BLAS thread and one core to a
worker, and threads that let each other finish.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

from tests.full import FULL, some

os.environ.update(
    EAGLE_MLX_CACHE=os.devnull,  # no test finds what another has left there
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    MPLBACKEND="Agg",
)
if not FULL:
    os.environ["MLX_DISABLE_COMPILE"] = "1"  # on a CPU g++ takes a second for each kernel, of which there are some 170
if FULL or {"EAGLE_FUZZ_ROUNDS", "KILLS", "SCHEMA_CASES", "SOAK_SECONDS"} & os.environ.keys():
    os.environ.setdefault("PYTEST_TIMEOUT", "3600")  # tests that are asked for more may take longer (pyproject.toml)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A worker's threads take turns, so that a second core is of no use to them; moving between cores cost an eighth.
    if hasattr(os, "sched_setaffinity"):
        cores, number = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(cores):
            os.sched_setaffinity(0, {cores[number % len(cores)]})
# MLX hands each operation to another thread on a CPU, and the operations of tiny models are shorter than the switch.
# As a batch the thread that wakes waits until the other pauses, which spares a fifth of the suite's time.
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from eagle_mlx.cpu import use_shortcuts, without_shortcuts

if TYPE_CHECKING:
    import mlx.core as mx

    from tests.hub_server import Hub

# The same code is judged by the same examples; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=some(100))
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")

gc.disable()  # until all tests are collected: what is imported stays, and looking through it took a fifth of that


def pytest_collection_finish() -> None:
    """Half a million objects of modules and tests are set aside: a server that ends looks for its own garbage alone."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_behind() -> Iterator[None]:
    """What a module's tests have dropped ends with them: engines, and the processes that grammars have begun."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _short_head_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands try a head on fewer tokens, unless in full or where the trial is what is tested.

    Those of the tests are random, so that a trial of 64 tokens takes 64 rounds, and most of a command's time.
    """
    trial = sys.modules.get("eagle_mlx.head_check")
    if trial is not None and not FULL and request.path.name != "test_head_check.py":
        monkeypatch.setattr(trial, "TOKENS", 24)


@pytest.fixture(autouse=True)
def _repeatable_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw the same noise in every run, so that no test of a distribution fails by chance."""
    if not FULL:
        monkeypatch.setattr("secrets.randbits", Random(0).getrandbits)


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    """The test takes the way that a GPU takes, whatever it runs on."""
    with without_shortcuts():
        yield


@pytest.fixture
def positions_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions, over all rows, each forward of a target has read."""
    from eagle_mlx.target import Forward, Target

    counts, forward = list[int](), Target.forward

    def counting(target: Target, tokens: mx.array, *args: Any, **more: Any) -> Forward:
        counts.append(tokens.size)
        return forward(target, tokens, *args, **more)

    monkeypatch.setattr(Target, "forward", counting)
    return counts


@pytest.fixture
def with_shortcuts() -> None:
    """The test is about what only a CPU does."""
    if not use_shortcuts():
        pytest.skip("on a GPU, or with EAGLE_MLX_CPU_SHORTCUTS=0")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLX compiles what asks for it, here and in the processes that are started; in full it does so in every test."""
    import mlx.core as mx

    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    mx.enable_compile()
    yield
    if not FULL:
        mx.disable_compile()


@pytest.fixture(params=[False, True], ids=["linux", "darwin"])
def acknowledge(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Send descriptors as `multiprocessing` does on this system: on Darwin the receiver confirms each with a byte.

    It holds here and in the processes that are started. What is tested must not depend on it.
    """
    on = bool(request.param)
    setting = f"import multiprocessing.reduction\nmultiprocessing.reduction.ACKNOWLEDGE = {on}\n"
    (tmp_path / "sitecustomize.py").write_text(setting, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("multiprocessing.reduction.ACKNOWLEDGE", on)
    return on


@pytest.fixture(scope="module")
def hub_running() -> Iterator[Hub]:
    from tests import hub_server

    with hub_server.serving() as running:
        yield running


@pytest.fixture
def online(hub_running: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A stand-in of the hub, empty and well."""
    from tests import hub_server

    hub_server.use(monkeypatch, hub_running.base, tmp_path / "huggingface")
    hub_running.clear()
    return hub_running
