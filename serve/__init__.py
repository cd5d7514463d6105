"""Serving a target: for now `eagle-bench`, which measures what serving with speculation gains."""
