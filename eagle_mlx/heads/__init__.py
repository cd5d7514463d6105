"""The networks that draft, one file an architecture: EAGLE-1/2, EAGLE-3 and MTP. `base.py` says what they share."""
