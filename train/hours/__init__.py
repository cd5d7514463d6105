"""A run of so many hours: portions of data, each drafted by the head as it is, and learning in between."""

from .phases import train_for_hours

__all__ = ["train_for_hours"]
