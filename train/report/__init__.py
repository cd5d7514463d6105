"""Reports on training runs: metrics, plots, comparisons."""

from .plots import OF_THE_HEAD, PICTURES, write_plots
from .runs import METRICS, Row, truncate

__all__ = ["METRICS", "OF_THE_HEAD", "PICTURES", "Row", "truncate", "write_plots"]
