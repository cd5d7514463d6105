"""What holds for every test: no network, no windows, the fast BLAS before MLX, one BLAS thread to a worker."""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    MPLBACKEND="Agg",
)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import settings

import eagle_mlx  # noqa: F401

# The same code is judged by the same examples; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")
