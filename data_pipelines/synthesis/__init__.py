"""What a target writes for its head to learn: conversations that it makes up, and answers to prompts that are there."""
