"""eagle-bench: compare speed, acceptance and texts of several ways to decode the same prompts, in one process."""
