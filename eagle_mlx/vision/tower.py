"""A target's vision tower, which mlx-vlm loads when the first image comes, and the input of forwards with images."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx import hub
from eagle_mlx.errors import PromptError, in_one_line, loading
from eagle_mlx.vision.images import ImageLimits, content_of, decode
from eagle_mlx.vision.spans import ImageSpan, ImageTokens, expanded, filled


@dataclass(frozen=True)
class Family:
    """The way in which mlx-vlm reads the images of a type of model."""

    processor: str  # the class in mlx-vlm that prepares images
    placeholder: str = "image_token"  # its attribute with the text that means an image
    around: tuple[str, str] = ("", "")  # what chat templates write before and after it
    has_axes: bool = False  # whether positions have three axes (M-RoPE)
    is_scaled: bool = False  # whether the text model multiplies embeddings, but not those of images


_QWEN = Family(
    "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor", around=("<|vision_start|>", "<|vision_end|>"), has_axes=True
)
FAMILIES = {
    "mistral3": Family("mistral3.processing_mistral3.Mistral3Processor"),
    "pixtral": Family("pixtral.processing_pixtral.PixtralProcessor"),
    "gemma3": Family("gemma3.processing_gemma3.Gemma3Processor", "boi_token"),
    "gemma4": Family("gemma4.processing_gemma4.Gemma4Processor", is_scaled=True),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
}
"""By `model_type` in config.json."""
_Key = tuple[bytes, ImageLimits]  # a hash of an image's file, and the limits within which it was read
_MOST_KNOWN = 256
"""Images whose tokens are remembered, of some 40 kB each: to prepare 2,560 x 1,600 pixels takes about a second."""
_WEIGHTS = ("vision", "visual", "multi_modal_projector")  # what names of weights outside the text model contain


class Vision:
    """Reads images for a target. Several threads may call `read`; embeddings belong to the engine's thread."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        embed: Callable[[mx.array], mx.array],
        dtype: mx.Dtype,
        is_sharded: bool = False,
    ):
        """`embed`: the target's token embedding, which the tower uses too. `is_sharded`: whether this process has only
        a part of the target. Loads nothing."""
        self._folder, self._config = folder, config
        self._is_sharded = is_sharded
        self._embed, self._dtype = embed, dtype
        self._width = int(config.get("text_config", {}).get("hidden_size", 0))
        self._lock = threading.Lock()
        self._known = dict[_Key, ImageTokens]()  # the newest images
        self._newest: tuple[_Key, ImageTokens, dict[str, Any]] | None = None  # with its prepared pixels

    @classmethod
    def of(
        cls, folder: Path, embed: Callable[[mx.array], mx.array], dtype: mx.Dtype, is_sharded: bool = False
    ) -> Vision | None:
        """Return the vision of a target's folder, or None if the model reads only text."""
        with suppress(OSError, ValueError):
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if isinstance(config, dict) and config.get("vision_config"):
                return cls(folder, config, embed, dtype, is_sharded)
        return None

    @property
    def problem(self) -> str | None:
        """Why no image can be read, with a remedy; None if images can be read."""
        kind = self._config.get("model_type")
        if self._is_sharded:
            return "images are not supported by a model over several processes; leave out --shard"
        if kind not in FAMILIES:
            return f"images are not supported for models of type {kind}, only for {', '.join(sorted(FAMILIES))}"
        if find_spec("mlx_vlm") is None or find_spec("PIL") is None:
            return "images need packages that are not installed: type: pip install 'eagle-mlx[vision]'"
        if not any(name for name, *_ in self._tensors):
            return "the model's files have no weights of a vision tower, so it reads only text"
        if self._family.has_axes and len(self._sections) != 3:
            return "the model's config.json has no mrope_section of three numbers, so no image can be read"
        return None

    def read_all(self, sources: Sequence[object], limits: ImageLimits) -> list[ImageTokens]:
        """Read the images of a request as `read` does. Raises PromptError, also if they are too many."""
        limits.check_number(len(sources))
        images = [self.read(source, limits) for source in sources]
        limits.check_tokens(sum(len(image.tokens) for image in images))
        return images

    def encode(self, text: str, images: Sequence[ImageTokens], encode: Callable[[str], Sequence[int]]) -> list[int]:
        """Return the tokens of a text with marks and with all tokens of the images, as `encode` reads the rest."""
        return filled(text, encode(self.expanded(text, images)), images)

    def expanded(self, text: str, images: Sequence[ImageTokens]) -> str:
        """Return a text with the images' own texts in place of their marks (`spans.expanded`)."""
        token = self._processor.tokenizer.convert_ids_to_tokens(self._image_token)
        return expanded(text, images, {self._placeholder, token})

    def read(self, source: object, limits: ImageLimits) -> ImageTokens:
        """Read an image (`images.content_of`). Raises PromptError, also if this target reads no images; TargetError.

        Only the newest image keeps its prepared pixels, some 100 MB. Others are prepared again if their features are
        needed, because a session sends all of its screenshots with every turn, and the prefix cache has most of them.
        """
        if self.problem is not None:
            raise PromptError(self.problem)
        data = content_of(source, limits)
        key = hashlib.blake2b(data).digest(), limits
        image = self._known.get(key)
        if image is None:
            image, inputs = self._prepare(decode(data, limits))
            with self._lock:
                self._known[key], self._newest = image, (key, image, inputs)
                if len(self._known) > _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
        return replace(image, compute=partial(self._compute, key, source, limits))

    def _prepare(self, image: Any) -> tuple[ImageTokens, dict[str, Any]]:
        """Return what an image of Pillow is among tokens, and the tower's inputs. Raises PromptError."""
        with self._lock:
            processor = self._processor
            try:
                text = self._placeholder.join(self._family.around)
                inputs = dict(processor(text=[text], images=[image], add_special_tokens=False))
            except Exception as e:  # other people's code; the sizes of an image may not suit it
                raise PromptError(f"the image cannot be prepared for this model: {in_one_line(e)}") from e
            ids = np.array(inputs["input_ids"])[0].tolist()  # in NumPy: MLX computes in the engine's thread
            places = [place for place, token in enumerate(ids) if token == self._image_token]
            first, end = places[0], places[-1] + 1
            text = processor.tokenizer.decode([*ids[: first + 1], *ids[end:]], skip_special_tokens=False)
            digest = hashlib.blake2b(self._identity + repr(image.size).encode() + image.tobytes()).digest()
        vision, grid = self._config["vision_config"], None
        if self._family.has_axes:
            sides = np.array(inputs["image_grid_thw"])[0].tolist()[1:]
            merged = int(vision.get("spatial_merge_size", 2))  # the patches that become one token, per side
            grid = sides[0] // merged, sides[1] // merged
        adding = len(vision.get("deepstack_visual_indexes", ()))  # layers to whose outputs it adds features
        nbytes = (1 + adding) * (end - first) * self._width * self._dtype.size
        is_block = self._config["text_config"].get("use_bidirectional_attention") == "vision"
        return ImageTokens(text, ids[first:end], digest, nbytes, is_block, grid), inputs

    def _compute(self, key: _Key, source: object, limits: ImageLimits) -> mx.array:
        """Return the features, [1 + D, n, H], of an image that was read before."""
        with self._lock:
            newest = self._newest if self._newest is not None and self._newest[0] == key else None
            self._newest = None if newest is not None else self._newest
        image, inputs = newest[1:] if newest is not None else self._prepare(decode(content_of(source, limits), limits))
        first = np.array(inputs["input_ids"])[0].tolist().index(self._image_token)
        rest = {name: value for name, value in inputs.items() if name != "attention_mask"}
        out = self._tower.get_input_embeddings(**rest, mask=inputs["attention_mask"])
        scale = self._width**0.5 if self._family.is_scaled else 1.0
        here = slice(first, first + len(image.tokens))
        features: mx.array = (out.inputs_embeds[:, here] / scale).astype(self._dtype)
        if out.deepstack_visual_embeds is not None:
            layers = [x.astype(self._dtype) for x in out.deepstack_visual_embeds]
            features = mx.concatenate([features, mx.stack(layers)])
        mx.eval(features)
        return features

    @cached_property
    def _processor(self) -> Any:
        with loading(f"what prepares images for {self._folder}"):
            module, _, name = self._family.processor.rpartition(".")
            return getattr(import_module(f"mlx_vlm.models.{module}"), name).from_pretrained(str(self._folder))

    @property
    def _placeholder(self) -> str:
        return str(getattr(self._processor, self._family.placeholder))

    @property
    def _family(self) -> Family:
        return FAMILIES[self._config["model_type"]]

    @property
    def _sections(self) -> list[int]:
        text = self._config.get("text_config", {})
        return list((text.get("rope_scaling") or text.get("rope_parameters") or {}).get("mrope_section", ()))

    @property
    def axis_of(self) -> list[int]:
        """The axis of each rotated pair of numbers, for M-RoPE: 0 time, 1 row, 2 column. They alternate as long as an
        axis has pairs left; the rest is time."""
        sections = self._sections
        return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]

    @property
    def _image_token(self) -> int:
        names = ("image_token_index", "image_token_id")
        return int(next(self._config[name] for name in names if name in self._config))

    @cached_property
    def _tower(self) -> Any:
        """mlx-vlm's model without its text part, which is not read from the files."""
        with loading(f"the vision tower of {self._folder}"):
            model = import_module("mlx_vlm.utils").load_model(self._folder, lazy=True)
            no_positions = lambda *_, **__: (None, None)  # noqa: E731  (`axes_positions` computes them)
            text = SimpleNamespace(embed_tokens=self._embed, embed_scale=1.0, hidden_size_per_layer_input=0)
            model.language_model = SimpleNamespace(model=text, get_rope_index=no_positions)
            model.audio_tower = model.embed_audio = None
            if hasattr(model.config, "hidden_size"):  # by which Gemma 3 divides what its text model will multiply
                model.config.hidden_size = self._width
            model.set_dtype(self._dtype)
            mx.eval(model.parameters())
            return model

    @cached_property
    def _identity(self) -> bytes:
        """A hash of the vision weights, all of their bytes, and of how images are prepared."""
        with loading(f"the vision weights of {self._folder}"):
            return self._hash()

    def _hash(self) -> bytes:
        digest = hashlib.blake2b(self._processor.image_processor.to_json_string().encode())
        digest.update(json.dumps(self._config, sort_keys=True).encode())
        for name, file, start, end in self._tensors:
            digest.update(name.encode())
            with file.open("rb") as opened:
                opened.seek(start)
                while start < end:
                    piece = opened.read(min(end - start, 1 << 24))
                    digest.update(piece)
                    start += max(1, len(piece))
        return digest.digest()

    @cached_property
    def _tensors(self) -> list[tuple[str, Path, int, int]]:
        """The vision weights: name, file, and where their bytes begin and end."""
        tensors = []
        for file in hub.weight_files(self._folder):
            with suppress(OSError, ValueError), file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size)) if file.suffix == ".safetensors" else {}
                for name, about in header.items():
                    if any(part in name for part in _WEIGHTS):
                        start, end = about["data_offsets"]
                        tensors.append((name, file, 8 + size + start, 8 + size + end))
        return sorted(tensors)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the vision weights that the first image will load."""
        if self.problem is not None or "_tower" in vars(self):
            return 0
        return sum(end - start for _, _, start, end in self._tensors)


@dataclass(frozen=True)
class ImageInput:
    """The input of a forward over tokens [1, L] of a prompt with images, besides the tokens."""

    tokens: mx.array  # [1, L] int32, 0 for those of images, which have no embeddings of layers either
    embeddings: mx.array  # [1, L, H], in place of the tokens' own
    after_layers: tuple[mx.array, ...] = ()  # what is added to the outputs of the first layers, each [1, L, H]
    positions: tuple[mx.array, ...] = ()  # for M-RoPE: time, row and column, each [1, L] int32

    @classmethod
    def of(
        cls, embed: Callable[[mx.array], mx.array], tokens: mx.array, start: int, images: Sequence[ImageSpan]
    ) -> ImageInput | None:
        """Return the input for the tokens [1, L] from position `start`; None if the tokens say all."""
        end = start + tokens.shape[1]
        here = [span for span in images if span.start < end and span.end > start]
        has_axes = any(span.image.grid is not None for span in images)
        if not here and not has_axes:
            return None
        embeddings, tokens = embed(tokens), mx.array(tokens)
        layers = here[0].image.features.shape[0] - 1 if here else 0
        inputs = [embeddings, *(mx.zeros_like(embeddings) for _ in range(layers))]
        for span in here:
            first, last = max(span.start, start), min(span.end, end)
            part = span.image.features[:, first - span.start : last - span.start].astype(embeddings.dtype)
            tokens[:, first - start : last - start] = 0
            for x, features in zip(inputs, part, strict=True):
                x[:, first - start : last - start] = features
        axes = axes_positions(end, images)[:, start:] if has_axes else ()
        return cls(tokens, inputs[0], tuple(inputs[1:]), tuple(mx.array(axis[None], mx.int32) for axis in axes))


def axes_positions(end: int, images: Sequence[ImageSpan]) -> NDArray[np.int64]:
    """Return [3, end]: the time, row and column of the first positions of a prompt, for M-RoPE.

    For text all three agree, and count from the largest of the image before it (`positions_shift`).
    """
    axes, shift = np.tile(np.arange(end), (3, 1)), 0
    for span in images:
        if span.image.grid is None:
            continue
        rows, columns = span.image.grid
        places = np.arange(rows * columns)
        part = axes[:, span.start : span.end]
        own = np.stack([0 * places, places // columns, places % columns])
        part[:] = span.start + shift + own[:, : part.shape[1]]
        shift += max(rows, columns) - rows * columns
        axes[:, span.end :] = np.arange(span.end, max(span.end, end)) + shift
    return axes
