"""What MLX is told of memory, by what a device says, and when freed buffers are given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx import memory
from eagle_mlx.memory import FreedBuffers, MLXLimits
from tests.fakes import tiny_target

GB = 1_000_000_000
MAC = {"device_name": "Apple M4 Pro", "max_recommended_working_set_size": 48 * GB, "memory_size": 64 * GB}


def test_a_mac_wires_what_it_recommends_and_keeps_few_freed_buffers() -> None:
    assert MLXLimits.of(MAC, metal=True) == MLXLimits(kept=3 * GB, wired=48 * GB)


def test_another_gpu_wires_nothing() -> None:
    assert MLXLimits.of({"total_memory": 80 * GB}, metal=False) == MLXLimits(kept=5 * GB, wired=None)


def test_a_machine_without_a_gpu_is_left_alone() -> None:
    assert MLXLimits.of({}, metal=False) == MLXLimits(None, None)


@given(st.integers(0, 512 * GB))
def test_prompts_that_are_kept_and_rows_leave_some_memory_to_others(free: int) -> None:
    rows, kept = memory.kv_bytes(free), memory.prefix_cache_bytes(free)
    assert kept <= rows
    assert rows <= max(1, 0.8 * free)


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    assert memory._left_of_container(tmp_path) > 1 << 60
    for name, text in (
        ("max", "8000"),
        ("current", "5000"),
        ("stat", "anon 100\ninactive_file 700\nactive_file 300\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory._left_of_container(tmp_path) == 4000


def test_freed_buffers_go_back_behind_each_chunk_now_and_then_and_when_nobody_is_left() -> None:
    times: list[int] = []
    freed = FreedBuffers(lambda: times.append(step))
    for step in range(1, 601):  # noqa: B007
        freed.after_step()
    assert times == [256, 512]
    step = 601
    freed.after_step(is_last=True)
    freed.after_chunk()
    assert times == [256, 512, 601, 601]
    for step in range(602, 858):  # noqa: B007
        freed.after_step()
    assert times[4:] == [857]


@pytest.mark.parametrize("chunk", [8, 64])
def test_an_engine_gives_them_back_behind_each_chunk_and_when_it_is_empty(chunk: int) -> None:
    given_back: list[int] = []
    engine = em.Engine(tiny_target(), prefill_chunk=chunk)
    engine._scheduler.freed = FreedBuffers(lambda: given_back.append(engine.active))
    engine.generate([[5] * 40], em.SamplingParams(max_tokens=300, ignore_eos=True))
    chunks = 39 // chunk + 1
    assert len(given_back) == chunks + 2  # 300 rounds, the last of them the end
    assert given_back[-1] == 0
