"""A training run from the first step to the report, with exact stop and resume."""

from . import state
from .folder import MADE, Identity, claim, resumed_config, run_folder
from .loop import BEST, LAST, REPORT, Run, check_incomplete, train, train_phases
from .phases import Phase, Phases
from .progress import HoursBar, Progress, Stopwatch
from .start import existing_head, new_head
from .state import Checkpoint
from .tracker import Tracker, check_wandb
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
    "new_head",
    "resumed_config",
    "run_folder",
    "run_worker",
    "state",
    "train",
    "train_phases",
]
