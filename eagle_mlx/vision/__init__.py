"""Images in prompts: mlx-vlm computes the embeddings of their tokens, and mlx-lm's text model reads these."""
