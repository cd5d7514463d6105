"""Limits of the images of a request."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.setting import ABOVE_0, AT_LEAST_1, Group, setting

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that OpenAI's and Anthropic's APIs take."""


@dataclass(frozen=True)
class ImageLimits(Group):
    """Limits of the images of a request."""

    images: int = setting(64, "images of a request", AT_LEAST_1, "max_images")
    mb: float = setting(16.0, "size of an image's file", ABOVE_0, "max_image_mb", "MB")
    megapixels: float = setting(40.0, "size of an image in millions of pixels", ABOVE_0, "max_image_megapixels", "MP")
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
