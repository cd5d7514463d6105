"""The disk tier's writer leaves the processor to those that compute."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle_mlx.engine.disk import DiskTier
from tests.fakes import tiny_target


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_the_writer_stands_back_however_far_its_process_does_so(tmp_path: Path) -> None:
    """As under `nice -n 5`: with the same number as the others it would take its full share."""
    found = list[int]()

    def begin() -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + 5)
        before = set(threading.enumerate())  # among them may be writers of tests before
        tier = DiskTier(tmp_path, 1 << 30, tiny_target())
        [writer] = set(threading.enumerate()) - before
        assert writer.native_id is not None
        deadline = time.monotonic() + 20
        while len(set(found)) < 2 and time.monotonic() < deadline:
            found[:] = [os.getpriority(os.PRIO_PROCESS, each) for each in (own, writer.native_id)]
        tier.close(60)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found[1] == min(19, found[0] + 10)
