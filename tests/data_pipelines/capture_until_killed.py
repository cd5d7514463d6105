"""A capture into shards that ends in the middle of anything: `python capture_until_killed.py FOLDER SECONDS`."""

from __future__ import annotations

import os
import signal
import sys

from eagle_mlx.data_pipelines.capturing import ShardCapture
from tests.data_pipelines.rows import AUX, conversations
from tests.fakes import tiny_target

if __name__ == "__main__":
    folder, seconds = sys.argv[1], float(sys.argv[2])
    plan = ShardCapture(tiny_target(), AUX, conversations(200), 8, batch_tokens=64, tokens_per_shard=30)
    with plan.open(folder) as shards:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process, so that a busy machine changes nothing
        plan.run(shards)
    os._exit(0)
