"""Reports on training runs: metrics, plots, comparisons."""

from .plots import OF_THE_HEAD, PICTURES, write_plots
from .runs import METRICS, Row, read_object, truncate
