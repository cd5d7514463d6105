"""The command eagle-heads."""
