"""Anthropic's Messages API: `schema` parses requests, `translate` turns them into chats, `answer` writes answers."""
