"""Use langchain-openai, instructor and litellm once each against a running eagle-serve; see README.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from pydantic import BaseModel, Field

QUESTION = "def add(a, b):"


class Point(BaseModel):
    """The object that the model fills in, small enough for small models."""

    x: int = Field(ge=0, le=99)
    axis: str = Field(pattern="^(left|right)$")


def langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=48)  # type: ignore[arg-type]
    whole = chat.invoke(QUESTION)
    assert whole.content
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == whole.content  # type: ignore[misc]
    point = chat.with_structured_output(Point, method="json_schema").invoke("Where is it?")
    assert isinstance(point, Point)


def instructor(url: str, model: str) -> None:
    import instructor as library
    from openai import OpenAI

    client = library.from_openai(OpenAI(base_url=url, api_key="none"), mode=library.Mode.JSON_SCHEMA)
    point = client.chat.completions.create(
        model=model,
        response_model=Point,
        messages=[{"role": "user", "content": "Where is it?"}],
        temperature=0,
        max_tokens=64,
    )
    assert isinstance(point, Point)


def litellm(url: str, model: str) -> None:
    import litellm as library

    ask = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 48}
    messages = [{"role": "user", "content": QUESTION}]
    whole = library.completion(messages=messages, **ask).choices[0].message.content
    pieces = library.completion(messages=messages, stream=True, **ask)
    assert whole == "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert library.completion(messages=messages, seed=1, logprobs=True, **ask).choices[0].logprobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="embedded")
    args = parser.parse_args()
    clients: list[Callable[[str, str], None]] = [langchain, instructor, litellm]
    failed = 0
    for client in clients:
        try:
            client(args.url, args.model)
            print(f"{client.__name__}: ok")
        except Exception as e:
            failed += 1
            print(f"{client.__name__}: {type(e).__name__}: {e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
