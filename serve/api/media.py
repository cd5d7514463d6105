"""Parts of messages that are not text: images, which some models read, and others, of which only a note remains."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_serializer

from eagle_mlx.errors import PromptError
from eagle_mlx.vision.images import TYPES, ImageLimits, data_of
from eagle_mlx.vision.spans import MARK, ImageTokens, mark
from eagle_mlx.vision.tower import Vision

from .. import log_once
from ..chat.history import PARAGRAPH
from .errors import ApiError

_MEDIA = re.compile(
    r"(input_)?(document|image|audio|video|file)(_url)?|search_result|container_upload"
    r"|\w+_tool_(use|result)|(?!function_|custom_tool_)\w+_call(_output)?|program(_output)?"
    r"|mcp_(list_tools|approval_(request|response))|tool_search_output|additional_tools|compaction|ghost_snapshot"
)


class Media(BaseModel):
    """An image, a sound, a document, or what a tool of another server did."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["media"]
    kind: str
    source: str | None = None
    """The URL of an image; None for all else."""

    @field_validator("kind")
    @classmethod
    def is_read_again(cls, kind: str) -> str:
        """Refuse what a client makes up: stored items are read again by their kind."""
        if not _MEDIA.fullmatch(kind):
            raise ValueError("this is no kind of image, sound, document or tool")
        return kind

    @property
    def note(self) -> str:
        """The text that the model sees instead."""
        log_once(f"a conversation has {self.kind} parts; the model reads only text and sees a note instead")
        return f"[{self.kind} left out: only text can be read here]"

    @model_serializer
    def as_sent(self) -> dict[str, str]:
        return {"type": self.kind, **({"image_url": self.source} if self.source else {})}


def without_data(part: object) -> object:
    """Reduce a part that is not text to its kind, and an image to its URL too, for `Media`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not (isinstance(part, dict) and isinstance(kind, str) and _MEDIA.fullmatch(kind)):
        return part
    return {"type": "media", "kind": kind, "source": _url_of(part) if kind in TYPES else None}


def with_retrieved_text(part: object) -> object:
    """Return Anthropic's search results and documents of text as a block of text, under their titles.

    Other parts are returned as `without_data` does.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("search_result", "document"):
        return without_data(part)
    about = part if kind == "search_result" else part.get("source")
    content: Any = about.get("data" if about.get("type") == "text" else "content") if isinstance(about, dict) else None
    if isinstance(content, list):
        content = PARAGRAPH.join(str(block["text"]) for block in content if isinstance(block, dict) and "text" in block)
    if not (isinstance(content, str) and content):
        return without_data(part)
    headings = [part[name] for name in ("title", "source", "context") if isinstance(part.get(name), str)]
    return {"type": "text", "text": PARAGRAPH.join([*headings, content])}


def _url_of(part: dict[str, Any]) -> str:
    """Return the URL of an image, empty if there is none."""
    about = next((part[name] for name in ("source", "image_url", "file_id") if part.get(name)), "")
    if isinstance(about, dict):
        is_data = about.get("type") == "base64"
        about = f"data:;base64,{about.get('data')}" if is_data else about.get("url", about.get("file_id"))
    return about if isinstance(about, str) else ""


def paragraphs(parts: Iterable[str]) -> str:
    """Join texts as paragraphs. Nothing separates an image from the text around it, as in Chat Completions."""
    first, last = mark(0).split("0")
    return PARAGRAPH.join(parts).replace(PARAGRAPH + first, first).replace(last + PARAGRAPH, last)


class PictureError(ApiError):
    """A refused image. Its place has the name that the client's API gives it, so `rename` keeps it."""

    def rename(self, field: str) -> None: ...


class Pictures:
    """The images of a conversation, by the numbers of the marks that stand for them in its texts."""

    def __init__(self, question: Any = None, where: str = "") -> None:
        """question: the content of the newest message if it is the user's own, not a result; where: its place.

        Raises ApiError 400 if it ends with a part that no model here reads. If it ends with an image, that must be
        read. In other messages, a note takes the place of images that cannot be read, because clients send them again.
        """
        self._images = list[tuple[Media, str]]()
        self._question = f"{where}[" if isinstance(question, list) else "["
        self._ends_with_image = isinstance(question, list) and bool(question) and isinstance(question[-1], Media)
        if self._ends_with_image and question[-1].source is None:
            where = f"{where}[{len(question) - 1}]"
            problem = f"{question[-1].kind} is not supported; this server reads only text"
            raise PictureError(400, f"{where}: {problem}", where)

    def text(self, part: Media, where: str) -> str:
        """Return the text of a part: for an image a mark, else a note."""
        if part.source is None:
            return part.note
        self._images.append((part, where))
        return mark(len(self._images) - 1)

    def in_place(self, text: str) -> str:
        """Return a text with the URLs of images in place of their marks."""
        return _replaced(text, [part.source or "" for part, _ in self._images])

    def read(
        self, messages: Sequence[dict[str, Any]], vision: Vision | None, limits: ImageLimits, check: Callable[[], None]
    ) -> tuple[list[dict[str, Any]], list[ImageTokens]]:
        """Return messages with marks for the images that were read, and these. A note takes the place of others.

        Raises ApiError 400 if the question has an image that cannot be read, or, if the model reads only text, if it
        ends with one; and what `check` raises, which is called before each image.
        """
        if not self._images:
            return list(messages), []
        problem = "this server reads only text" if vision is None else vision.problem
        read, texts = list[ImageTokens](), list[str]()
        for index, (part, where) in enumerate(self._images):
            check()
            is_asked = where.startswith(self._question)
            try:
                if problem is not None or vision is None:
                    is_asked = self._ends_with_image and index == len(self._images) - 1
                    raise PromptError(f"{part.kind} is not supported; {problem}")
                limits.check_number(index + 1)
                image = vision.read(data_of(part.source or "", limits), limits)
            except PromptError as e:
                if is_asked:
                    raise PictureError(400, f"{where}: {e}", where) from e
                texts.append(part.note if problem else f"[{part.kind} left out: it cannot be read]")
            else:
                texts.append(mark(len(read)))
                read.append(image)
        limits.check_tokens(sum(len(image.tokens) for image in read))

        return [{**message, "content": _replaced(message.get("content") or "", texts)} for message in messages], read


def _replaced(text: str, others: Sequence[str]) -> str:
    """Return a text with others in place of its marks."""
    return MARK.sub(lambda match: others[int(match[1])] if int(match[1]) < len(others) else "", text)
