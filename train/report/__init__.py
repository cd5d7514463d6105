"""What runs leave for people: metrics, pictures, comparisons."""

from .metrics import METRICS, Row, cut_back
from .plots import OF_THE_HEAD, PICTURES, write_plots

__all__ = ["METRICS", "OF_THE_HEAD", "PICTURES", "Row", "cut_back", "write_plots"]
