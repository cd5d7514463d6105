"""eagle-serve: an HTTP server with OpenAI's and Anthropic's APIs.

`server.create_app` makes the FastAPI application, `worker.Worker` is the thread that owns the engine, and `loader.load`
loads the model. A request passes `guard`, and `received` reads its body. `answer.respond` admits it and asks a
`PendingAnswer` for the `Answer`, whose engine requests `worker` decodes, and which is sent as JSON or as events.
`messages` and `responses` translate their APIs to and from Chat Completions.
"""
