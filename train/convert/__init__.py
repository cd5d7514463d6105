"""eagle-convert: heads in the layouts of other servers (`convert`), and MTP heads out of models (`extract`)."""

from .extract import Extraction, extract
from .layouts import Conversion, convert

__all__ = ["Conversion", "Extraction", "convert", "extract"]
