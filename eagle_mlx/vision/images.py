"""Files of images: where they may come from, their limits, and decoding."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from eagle_mlx.errors import ConfigError, PromptError, in_one_line
from eagle_mlx.setting import ABOVE_0, AT_LEAST_1, Group, Limit, setting
from eagle_mlx.vision.spans import mark

Image = Any
"""An image of Pillow, which the extra `vision` brings."""
TYPES = ("image", "image_url", "input_image")
"""Types of a message's parts that are images, in Anthropic's API and in OpenAI's two."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that OpenAI's and Anthropic's APIs take."""
_PIXELS = Limit(lambda size: 0 < size <= 178, "must be above 0 and at most 178, the limit of Pillow, not {}")


@dataclass(frozen=True)
class ImageLimits(Group):
    """Limits of the images of a request."""

    images: int = setting(64, "images of a request", AT_LEAST_1, "max_images")
    mb: float = setting(16.0, "size of an image's file", ABOVE_0, "max_image_mb", "MB")
    megapixels: float = setting(40.0, "size of an image in millions of pixels", _PIXELS, "max_image_megapixels", "MP")
    tokens: int = setting(262_144, "tokens of all images of a request together", AT_LEAST_1, "max_image_tokens")
    """By default, the longest context of these models: a session of many screenshots ends there at the earliest."""
    formats: str = setting(",".join(_FORMATS), "formats of images, separated by commas", None, "image_formats", "LIST")

    def _check(self) -> None:
        if unknown := set(self.allowed) - set(_FORMATS):
            raise ConfigError(f"--image-formats: {min(unknown)} is not supported; choose from {', '.join(_FORMATS)}")

    @property
    def allowed(self) -> list[str]:
        return [name.strip().upper() for name in self.formats.split(",")]

    def check_number(self, count: int) -> None:
        """Raise PromptError for more images than a request may have."""
        if count > self.images:
            raise PromptError(f"the request has {count} images; send at most {self.images}")

    def check_tokens(self, count: int) -> None:
        """Raise PromptError if all images of a request have too many tokens together."""
        if count > self.tokens:
            raise PromptError(f"the images have {count} tokens; the limit is {self.tokens} (--max-image-tokens)")

    def check_size(self, nbytes: float) -> None:
        """Raise PromptError for a file that is too large."""
        if nbytes > self.mb * 1e6:
            raise PromptError(f"the image has {nbytes / 1e6:.1f} MB; the limit is {self.mb:g} MB (--max-image-mb)")


def data_of(url: str, limits: ImageLimits) -> bytes:
    """Return the content of a `data:` URL. Raises PromptError for any other URL, and for one that is too large."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        kind = f"{scheme.lower()[:20]} URLs" if "://" in url[:32] else "anything but data: URLs"
        raise PromptError(f"EAGLE-MLX does not fetch {kind}; give the image itself, as data:image/png;base64,…")
    head, _, text = rest.partition(",")
    if not head.lower().endswith(";base64"):
        raise PromptError("the data: URL of an image must be in base64, such as data:image/png;base64,…")
    return from_base64(text, limits)


def from_base64(text: str, limits: ImageLimits) -> bytes:
    """Return decoded base64. Raises PromptError if it is invalid, or too large, before decoding."""
    limits.check_size(3 * len(text) / 4)
    try:
        return b64decode(text, validate=True)
    except ValueError as e:
        raise PromptError(f"the image is not valid base64: {e}") from e


def file_of(name: str | Path, limits: ImageLimits) -> bytes:
    """Return the content of a local file. Raises PromptError if it cannot be read or is too large."""
    try:
        path = Path(name).expanduser()
        limits.check_size(path.stat().st_size)
        return path.read_bytes()
    except (OSError, RuntimeError) as e:  # the second for `~name` if there is no such user
        raise PromptError(f"the image {name} cannot be read: {getattr(e, 'strerror', None) or e}") from e


def decode(data: bytes, limits: ImageLimits) -> Image:
    """Return an image in RGB, upright. Raises PromptError if it cannot be decoded or exceeds the limits. The size in
    pixels is checked before anything is decoded."""
    limits.check_size(len(data))
    try:
        image = import_module("PIL.Image").open(BytesIO(data), formats=limits.allowed)
        megapixels = math.prod(image.size) / 1e6
        if megapixels > limits.megapixels:
            limit = f"the limit is {limits.megapixels:g} (--max-image-megapixels)"
            raise PromptError(f"the image has {megapixels:.1f} million pixels; {limit}")
        if getattr(image, "is_animated", False):
            raise PromptError("the image is animated; send one frame")
        return import_module("PIL.ImageOps").exif_transpose(image).convert("RGB")
    except PromptError:
        raise
    except Exception as e:  # decoders raise anything for damaged files
        formats = ", ".join(limits.allowed)
        problem = in_one_line(e).partition(" <")[0]  # without Pillow's name of our file object
        raise PromptError(f"the image cannot be decoded ({problem}); send a whole file in {formats}") from e


def content_of(source: object, limits: ImageLimits) -> bytes:
    """Return the content of an image's file, of which the source is a `data:` URL, a path, an image of Pillow, or the
    content itself. Raises PromptError."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and (source.startswith("data:") or "://" in source):
        return data_of(source, limits)
    if isinstance(source, str | Path):
        return file_of(source, limits)
    if callable(convert := getattr(source, "convert", None)):
        convert("RGB").save(file := BytesIO(), "PNG")
        return file.getvalue()
    raise PromptError(f"an image is a file, its content or a data: URL, not {source!r:.80}")


def with_marks(parts: Sequence[Mapping[str, Any]], sources: list[object]) -> str:
    """Return the text of a content's parts, with marks for images; where these come from is appended to `sources`."""
    texts = []
    for part in parts:
        if part.get("type") in TYPES:
            source = part.get("image", part.get("image_url"))
            sources.append(source.get("url") if isinstance(source, Mapping) else source)
            texts.append(mark(len(sources) - 1))
        else:
            texts.append(str(part.get("text", "")))
    return "".join(texts)


def take_images(messages: Sequence[Mapping[str, Any]], joins: bool) -> tuple[list[dict[str, Any]], list[object]]:
    """Return messages with marks in place of images, and where the images come from.

    A content may be a list of parts: `{"type": "text", "text": …}`, `{"type": "image", "image": …}`, or
    `{"type": "image_url", "image_url": {"url": …}}`. Other parts stay as they are, unless `joins`: then several
    texts become one, as models without vision need it.
    """
    sources, changed = list[object](), list[dict[str, Any]]()
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        types = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
        if any(kind in TYPES for kind in types) or (joins and 0 < len(types) == types.count("text")):
            content = with_marks(parts, sources)
        changed.append({**message, "content": content} if "content" in message else dict(message))
    return changed, sources
