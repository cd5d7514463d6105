"""What files of heads have in common: fields of config.json, tensors, and PyTorch's weights."""
