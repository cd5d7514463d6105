"""Runs with a time limit (`--hours`), which alternate between making data with the current head and learning."""

from .phases import FINGERPRINT, train_for_hours
