"""eagle-convert: convert heads to other servers' layouts (`convert`), and extract MTP heads from models (`extract`)."""

from .extract import Extraction, extract
from .layouts import Conversion, convert

__all__ = ["Conversion", "Extraction", "convert", "extract"]
