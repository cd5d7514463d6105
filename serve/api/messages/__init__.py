"""Anthropic's Messages API: `request` parses requests and turns them into chats, `answer` writes answers."""
