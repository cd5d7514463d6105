"""eagle-bench: the same prompts, machine and process, decoded by mlx-lm, plainly, with n-grams and with a head."""
