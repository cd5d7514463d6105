"""Anthropic's Messages API, as a front door to what Chat Completions asks of the engine.

A request is read by `schema`, written as a chat by `translate`, prepared as any chat, and answered by `events`.
"""
