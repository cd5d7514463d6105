"""From logits to tokens: sampling, its noise, draft trees, the rules of acceptance. Pure functions over a batch.

`sampling.py` defines the distribution, `verify.py` what is kept of a draft, `draft.py` who sees whom in one.
`processors.py` and `masks.py` apply what requests ask to be done to logits, at every position of a draft.
"""
