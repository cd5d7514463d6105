"""Proposers: heads, draft models and n-grams. `base.py` has the protocol between a proposer and the engine."""
