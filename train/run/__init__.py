"""A training run from the first step to the report, with exact stop and resume."""

from . import state
from .folder import BEST, LAST, MADE, REPORT, Setup, check_incomplete, claim, data_fingerprint, resumed_config, set_up
from .loop import Phase, Result, Run, train
from .start import existing_head, new_head
from .state import Bar, Stopwatch
from .tracker import check_wandb
from .workers import run_worker
