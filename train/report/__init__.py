"""Reports on training runs: metrics, plots, comparisons."""

from .plots import OF_THE_HEAD, PICTURES, Row, write_plots
from .runs import METRICS, read_object, truncate
