"""Conversations that a target makes up, and its answers to existing prompts."""
