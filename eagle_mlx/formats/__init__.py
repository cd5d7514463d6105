"""Code for all file layouts of heads: fields of config.json, tensors, and PyTorch weights."""
