"""A training run from the first step to the report, with exact stop and resume."""

from . import state
from .folder import BEST, LAST, MADE, REPORT, check_incomplete, claim, data_fingerprint, resumed_config
from .loop import Phase, Result, Run, train
from .start import Setup, existing_head, new_head, run_worker, set_up
from .state import Bar, Stopwatch
from .tracker import check_wandb
