"""From logits to tokens: sampling, its noise, draft trees, and acceptance rules, as pure functions over a batch.

`sampling.py` defines the distribution, `verify.py` the acceptance rules, and `draft.py` chains and trees.
`processors.py` applies requests' penalties, logits processors and grammars at every position of a draft.
"""
