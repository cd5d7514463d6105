"""A run from its first step to its report, stopped and resumed exactly."""

from .identity import resumed_config
from .loop import BEST, LAST, REPORT, train
from .processes import run_worker
from .start import existing_head
from .wandb_run import check_wandb

__all__ = ["BEST", "LAST", "REPORT", "check_wandb", "existing_head", "resumed_config", "run_worker", "train"]
