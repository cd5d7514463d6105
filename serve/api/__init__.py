"""eagle-serve: the engine over HTTP, in the shapes that OpenAI's clients know.

`app.create_app` makes the FastAPI application, `worker.Worker` the thread that owns the engine, and `loader.load` what
that thread serves. A request passes `guard`, is read by `schema`, becomes requests of the engine in `chat` or
`completions`, is decoded by `worker`, and is answered by `stream` or `answer`. The APIs in `messages` and `responses`
are translated to what `chat` takes, and back.
"""
