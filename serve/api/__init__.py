"""eagle-serve: the engine over HTTP, in the shapes that OpenAI's clients know.

A request's way: `app` refuses what may not come in, `schema` reads the body, `chat` or `completions` makes rows of it,
`worker` decodes them in its own thread and tells what is new, `stream` or `answer` writes it down.
"""
