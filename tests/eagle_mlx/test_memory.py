"""Memory limits that MLX gets for each device, and when freed buffers are returned."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx import memory
from eagle_mlx.memory import FreedBuffers
from tests.fakes import tiny_target

GB = 1_000_000_000
MAC = {"device_name": "Apple M4 Pro", "max_recommended_working_set_size": 48 * GB, "memory_size": 64 * GB}


def test_freed_buffers_are_limited_on_a_gpu_only() -> None:
    assert memory.kept_bytes(MAC) == 3 * GB
    assert memory.kept_bytes({"total_memory": 80 * GB}) == 5 * GB
    assert memory.kept_bytes({}) is None


@pytest.mark.parametrize(
    ("active", "machine", "recommended", "wired"),
    [
        (9 * GB, 64 * GB, 48 * GB, 9 * GB),  # the active memory
        (45 * GB, 64 * GB, 48 * GB, 38_400_000_000),  # at most three fifths of the machine's memory
        (12 * GB, 16 << 30, 11 * GB, 10_307_921_510),
        (12 * GB, 24 * GB, 10 * GB, 10 * GB),  # MLX refuses more than the recommended size
        (0, 16 << 30, 11 * GB, 0),
    ],
)
def test_active_memory_is_wired_within_bounds(active: int, machine: int, recommended: int, wired: int) -> None:
    assert memory.wired_bytes(active, machine, recommended) == wired


@given(st.integers(0, 1 << 42), st.integers(1 << 30, 1 << 42), st.integers(0, 1 << 42))
def test_wired_memory_never_exceeds_active_or_recommended_memory(active: int, machine: int, recommended: int) -> None:
    wired = memory.wired_bytes(active, machine, recommended)
    assert 0 <= wired <= min(active, recommended)
    assert wired <= 0.6 * machine


@given(st.integers(0, 512 * GB), st.integers(1, 512 * GB))
def test_prefixes_and_rows_leave_memory_for_other_programs(free: int, machine: int) -> None:
    rows, kept = memory.kv_bytes(free, machine), memory.prefix_cache_bytes(free)
    assert kept <= rows
    assert rows <= max(1, 0.8 * free)


@pytest.mark.parametrize(
    ("machine", "share"),
    [(8 << 30, 0.6), (16 * GB, 0.6), (17_180_000_000 - (1 << 20), 0.6), (16 << 30, 0.6), (18 << 30, 0.8), (None, 0.8)],
)
def test_small_machines_have_a_smaller_share_for_keys_and_values(machine: int | None, share: float) -> None:
    assert memory.kv_bytes(10 * GB, machine) == share * 10 * GB


def test_the_kv_share_of_an_engine_depends_on_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(em.Target, "free_memory", property(lambda _: 10 * GB))
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 16384}[name])
    assert em.Engine(target).kv_budget.nbytes == 6 * GB
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 21, "SC_PAGE_SIZE": 16384}[name])
    assert em.Engine(target).kv_budget.nbytes == 8 * GB


def test_a_containers_limit_reduces_free_memory(tmp_path: Path) -> None:
    assert memory.left_of_container(tmp_path) > 1 << 60
    for name, text in (
        ("max", "8000"),
        ("current", "5000"),
        ("stat", "anon 100\ninactive_file 700\nactive_file 300\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.left_of_container(tmp_path) == 4000


def test_freed_buffers_are_returned_after_a_last_step_and_every_256() -> None:
    times: list[int] = []
    freed = FreedBuffers(lambda: times.append(step))
    for step in range(1, 601):  # noqa: B007
        freed.after_step()
    assert times == [256, 512]
    step = 601
    freed.after_step(is_last=True)
    assert times == [256, 512, 601]
    for step in range(602, 858):  # noqa: B007
        freed.after_step()
    assert times[3:] == [857]


@pytest.mark.parametrize("chunk", [8, 64])
def test_an_engine_returns_freed_buffers_after_each_chunk_and_when_idle(chunk: int) -> None:
    given_back: list[int] = []
    engine = em.Engine(tiny_target(), prefill_chunk=chunk)
    engine.admission.freed = FreedBuffers(lambda: given_back.append(engine.active))
    engine.generate([[5] * 40], em.SamplingParams(max_tokens=300, ignore_eos=True))
    chunks = 39 // chunk + 1
    assert len(given_back) == chunks + 2  # 300 rounds, and the end
    assert given_back[-1] == 0
