"""A capture into shards that a test kills: `python capture_until_killed.py FOLDER SECONDS`."""

from __future__ import annotations

import os
import signal
import sys
import threading

from eagle_mlx.data_pipelines.capturing import ShardCapture
from tests.data_pipelines.rows import AUX, conversations
from tests.fakes import tiny_target

if __name__ == "__main__":
    folder, seconds = sys.argv[1], float(sys.argv[2])
    plan = ShardCapture(tiny_target(), AUX, conversations(200), 8, batch_tokens=64, tokens_per_shard=30)
    clock = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    clock.daemon = True
    with plan.open(folder) as shards:
        clock.start()
        plan.run(shards)
    os._exit(0)
