"""eagle-serve: an HTTP server with OpenAI's and Anthropic's APIs.

`server.create_app` makes the FastAPI application, `worker.Worker` is the thread that owns the engine, and `loader.load`
loads the model. A request passes `guard`; `received` reads its body as a class of `schema`; `flow` admits it and asks
its `Pending` answer for engine requests, which `worker` decodes; the `Answer` of `answer` writes them as JSON or as
events. `messages` and `responses` translate their APIs to and from Chat Completions.
"""
