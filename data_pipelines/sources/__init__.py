"""Where conversations come from, what of them is kept, and in which order."""
