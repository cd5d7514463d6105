"""Ways to draft: a head, a draft model, n-grams. `base.py` has the protocol that an engine asks of them."""
