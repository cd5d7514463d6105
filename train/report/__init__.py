"""What runs leave for people: metrics, pictures, comparisons."""

from .metrics import METRICS, Row, truncate
from .plots import OF_THE_HEAD, PICTURES, write_plots

__all__ = ["METRICS", "OF_THE_HEAD", "PICTURES", "Row", "truncate", "write_plots"]
