"""A run from its first step to its report, stopped and resumed exactly."""

from . import identity, state
from .identity import Identity, resumed_config
from .loop import BEST, LAST, REPORT, Run, Stopwatch, check_incomplete, train
from .output import claim, run_folder
from .processes import run_worker
from .progress import Progress, mean
from .start import existing_head, new_head
from .state import Checkpoint
from .tracker import Tracker
from .wandb_run import check_wandb

__all__ = [
    "BEST",
    "LAST",
    "REPORT",
    "Checkpoint",
    "Identity",
    "Progress",
    "Run",
    "Stopwatch",
    "Tracker",
    "check_incomplete",
    "check_wandb",
    "claim",
    "existing_head",
    "identity",
    "mean",
    "new_head",
    "resumed_config",
    "run_folder",
    "run_worker",
    "state",
    "train",
]
