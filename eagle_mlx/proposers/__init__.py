"""Ways to draft: a head (`head.py`), a draft model, n-grams. `base.py` has the protocol between them and the engine."""
