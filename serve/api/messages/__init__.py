"""Anthropic's Messages API: requests are read by `schema`, written as a chat by `translate`, answered by `answer`."""
