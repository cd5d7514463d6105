"""A training run from the first step to the report, with exact stop and resume."""

from . import state
from .folder import BEST, LAST, MADE, claim, resumed_config
from .loop import REPORT, Run, check_incomplete, train
from .phases import Phase, Phases, PlainPhases, run_worker
from .start import existing_head, new_head
from .state import Bar, Stopwatch
from .tracker import check_wandb
