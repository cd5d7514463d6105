"""From logits to tokens: sampling, its noise, draft trees, and acceptance rules, as pure functions over a batch."""
