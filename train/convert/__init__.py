"""Heads from one layout into another, and out of the models that they were published in."""
