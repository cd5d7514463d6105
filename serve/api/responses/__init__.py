"""OpenAI's Responses API, as a front door to what Chat Completions asks of the engine.

A request is read by `schema`, its tools by `tools`, and both are written as a chat by `translate`. It is prepared as
any chat, answered by `answer` whole or by `events` as a stream, and kept by `memory` for the next turn.
"""
