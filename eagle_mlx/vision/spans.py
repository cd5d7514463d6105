"""Images as tokens of a prompt: where they are, and their embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from eagle_mlx.errors import PromptError

if TYPE_CHECKING:
    import mlx.core as mx

MARK = re.compile("\U0001fffe([0-9]{1,6})\U0001ffff")
"""An image's number between two noncharacters of Unicode, which texts do not contain."""


def mark(index: int) -> str:
    """Return the text that stands for an image in messages, until the chat template has written them."""
    return f"\U0001fffe{index}\U0001ffff"


@dataclass(eq=False)
class ImageTokens:
    """An image, read for a target."""

    text: str = field(repr=False)  # what the tokenizer reads in place of the mark, with a single placeholder
    tokens: list[int] = field(repr=False)  # [n], from its first to its last placeholder
    digest: bytes = field(repr=False)  # of its pixels, of how they are prepared, and of the vision weights
    nbytes: int  # of its features
    is_block: bool  # whether its tokens attend to one another in both directions
    grid: tuple[int, int] | None  # its rows and columns of tokens, if rotary angles depend on them (M-RoPE)
    compute: Callable[[], mx.array] | None = field(default=None, repr=False)

    @cached_property
    def features(self) -> mx.array:
        """[1 + D, n, H], computed when they are first needed, then kept: the embeddings of its tokens, and what the
        first D layers add to their outputs."""
        assert self.compute is not None
        return self.compute()


@dataclass(frozen=True)
class ImageSpan:
    """An image at its place in a prompt."""

    start: int
    image: ImageTokens

    @property
    def end(self) -> int:
        return self.start + len(self.image.tokens)


def positions_shift(images: Sequence[ImageSpan]) -> int:
    """Return how far tokens after these images are from their own places, for M-RoPE: an image takes as many positions
    as its longer side has tokens."""
    grids = (span.image.grid for span in images)
    return sum(max(grid) - grid[0] * grid[1] for grid in grids if grid is not None)


@dataclass(frozen=True)
class ImagePrompt:
    """Token ids of a prompt with images."""

    tokens: list[int]
    images: tuple[ImageSpan, ...]


def expanded(text: str, images: Sequence[ImageTokens], placeholders: Iterable[str]) -> str:
    """Return a text with each image's own text in place of its mark. Placeholders in the text itself, where a client or
    the model wrote them, are broken by an invisible character, so that they mean no image."""
    for placeholder in placeholders:
        text = text.replace(placeholder, f"{placeholder[0]}\u2060{placeholder[1:]}")
    return MARK.sub(lambda match: images[int(match[1])].text if int(match[1]) < len(images) else "", text)


def filled(text: str, tokens: Sequence[int], images: Sequence[ImageTokens]) -> list[int]:
    """Return the tokens of an `expanded` text with all tokens of each image in place of its single placeholder: a
    tokenizer would take a second for those of twenty screenshots."""
    numbers = (number for number in map(int, MARK.findall(text)) if number < len(images))
    whole = list[int]()
    for token in tokens:
        number = next(numbers, None) if token == images[0].tokens[0] else None
        whole += [token] if number is None else images[number].tokens
    return whole


def placed(text: str, tokens: Sequence[int], images: Sequence[ImageTokens]) -> tuple[ImageSpan, ...]:
    """Return where the images of a text with marks are among its tokens. Raises PromptError if the text has not each
    image once, or if the tokens are not theirs."""
    order = list(map(int, MARK.findall(text)))
    if sorted(order) != list(range(len(images))):
        raise PromptError("the chat template of this model does not write each image once")
    spans, at = list[ImageSpan](), 0
    for image in (images[number] for number in order):
        with_first = (place for place in range(at, len(tokens)) if tokens[place] == image.tokens[0])
        start = next(with_first, len(tokens))
        at = start + len(image.tokens)
        if list(tokens[start:at]) != image.tokens:
            raise PromptError("the chat template and the tokenizer of this model do not keep images as they are")
        spans.append(ImageSpan(start, image))
    if images and images[0].tokens[0] in tokens[at:]:
        raise PromptError("the prompt has more placeholders than images; leave placeholders out of texts")
    return tuple(spans)
