"""eagle-serve: an HTTP server with OpenAI's and Anthropic's APIs.

`app.create_app` makes the FastAPI application, `worker.Worker` is the thread that owns the engine, and `loader.load`
loads the model. A request passes `guard`, is parsed by `schema`, becomes engine requests in `chat` or `completions`, is
decoded by `worker`, and is answered by `answer`. `messages` and `responses` translate their APIs to and from Chat
Completions.
"""
