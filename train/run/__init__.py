"""A run from its first step to its report, stopped and resumed exactly."""

from . import identity, state
from .identity import Identity, resumed_config
from .loop import BEST, LAST, REPORT, Run, check_incomplete, train, train_phases
from .output import MADE, claim, run_folder
from .phases import Phase, Phases
from .progress import HoursBar, Progress, Stopwatch
from .start import existing_head, new_head
from .state import Checkpoint
from .tracker import Tracker
from .wandb_run import check_wandb
from .workers import run_worker

__all__ = [
    "BEST",
    "LAST",
    "MADE",
    "REPORT",
    "Checkpoint",
    "HoursBar",
    "Identity",
    "Phase",
    "Phases",
    "Progress",
    "Run",
    "Stopwatch",
    "Tracker",
    "check_incomplete",
    "check_wandb",
    "claim",
    "existing_head",
    "identity",
    "new_head",
    "resumed_config",
    "run_folder",
    "run_worker",
    "state",
    "train",
    "train_phases",
]
