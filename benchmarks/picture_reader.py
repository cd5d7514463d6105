"""Make a text model read pictures of words, so that answers to pictures and to typed text can be compared.

    python benchmarks/picture_reader.py --target out/real/smollm2-135m-instruct --output out/reader
    python benchmarks/images.py --target out/reader/model --head checkpoints/smollm2-135m-instruct \\
        --pictures out/reader/questions.jsonl

A picture shows a question, one cell for each token. A small vision tower of Mistral 3's kind is fitted to give these
tokens' embeddings from the pixels; the text model stays as it is. So a question means the same typed and as a picture,
but heads and n-grams see only placeholders in a picture. The model reads these cells and nothing else of the world.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import eagle_mlx as em  # first: it brings the fast BLAS before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.utils import update_module_configs
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from eagle_mlx.serve.prompts import read_questions

ROOT = Path(__file__).parents[1]
PATCH = 20
CELL = 2 * PATCH
"""Pixels of a side: four patches become one token."""
LONGEST = 64
"""Tokens of a question."""
LINE = 6
"""Characters of a line in a cell, which has three."""
PAPER = 117
"""Gray that the processor turns into about 0, so that only letters are seen."""
MEAN, STD = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
"""How Mistral 3's processor normalizes colors (transformers, OPENAI_CLIP_MEAN and OPENAI_CLIP_STD)."""
NAMES = {"image_token": "<file_sep>", "image_break_token": "<gh_stars>", "image_end_token": "<empty_output>"}
"""Special tokens of SmolLM2 that its chats do not use."""
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained "
    "by Hugging Face<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOWER = {
    **{"model_type": "pixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64},
    **{"num_attention_heads": 4, "patch_size": PATCH, "image_size": LONGEST * CELL, "rope_theta": 10000.0},
}


def glyph(text: str) -> NDArray[np.uint8]:
    """Return the cell [CELL, CELL] that shows a token. A bar on the left stands for a space before it."""
    image = Image.new("L", (CELL, CELL), PAPER)
    draw = ImageDraw.Draw(image)
    word = text.removeprefix(" ")
    if word != text:
        draw.line((1, 2, 1, CELL - 3), fill=255)
    lines = [word[start : start + LINE] for start in range(0, len(word), LINE)]
    for number, line in enumerate(lines[:3]):
        draw.text((4, 1 + 13 * number), line.replace("\n", "|"), font=ImageFont.load_default(10), fill=255)
    return np.asarray(image)


def picture(cells: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the picture [CELL, CELL * n, 3] of a text's cells."""
    return np.concatenate(cells, axis=1)[..., None].repeat(3, axis=-1)


def first_turn(content: Any) -> str:
    return content if isinstance(content, str) else content[0]["content"]


def reader(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's Mistral 3 with a new tower in front of a Llama's text model, and its config."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    image = next(token["id"] for token in tokens if token["content"] == NAMES["image_token"])
    config = {
        **{"model_type": "mistral3", "image_token_index": image, "vision_feature_layer": -1, "spatial_merge_size": 2},
        **{"multimodal_projector_bias": False, "eos_token_id": text["eos_token_id"]},
        "text_config": {"head_dim": text["hidden_size"] // text["num_attention_heads"], **text, "model_type": "llama"},
        "vision_config": TOWER,
    }
    module = importlib.import_module("mlx_vlm.models.mistral3")
    parts = update_module_configs(module.ModelConfig.from_dict(config), module, config, ["text", "vision"])
    return module.Model(parts), config


class Eye(nn.Module):
    """The parts of the model that read pictures."""

    def __init__(self, model: Any):
        super().__init__()
        self.vision_tower, self.multi_modal_projector = model.vision_tower, model.multi_modal_projector

    def __call__(self, picture: NDArray[np.uint8]) -> mx.array:
        """Return [n, H] for a picture of n cells."""
        pixels = mx.array(((picture / 255 - MEAN) / STD).astype(np.float32))
        *_, states = self.vision_tower(pixels[None], output_hidden_states=True)
        features: mx.array = self.multi_modal_projector(states[-1], [pixels.shape[:2]])
        return features


def fit(eye: Eye, embedding: mx.array, cells: dict[int, NDArray[np.uint8]]) -> None:
    """Make the last layer give the embeddings [V, H] of the tokens that cells show, by least squares.

    All other weights are random. A cell's features do not depend on others, since attention adds nothing, so up to H
    tokens are read exactly.
    """
    for layer in eye.vision_tower.vision_model.transformer.layers:
        layer.attention.o_proj.weight = mx.zeros_like(layer.attention.o_proj.weight)
    last = eye.multi_modal_projector.linear_2
    last.weight = mx.eye(last.weight.shape[0])
    features = np.array(eye(picture(list(cells.values()))), np.float64)
    wanted = np.array(embedding[mx.array(list(cells))], np.float64)
    last.weight = mx.array(np.linalg.lstsq(features, wanted, rcond=None)[0].T.astype(np.float32))


def write(folder: Path, source: Path, eye: Eye, config: dict[str, Any], text: dict[str, mx.array]) -> None:
    """Write the model's folder, which mlx-lm and mlx-vlm both load. text: the weights of the text model."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"language_model.{name}": x for name, x in text.items()} | dict(tree_flatten(eye.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    shutil.copy(source / "tokenizer.json", folder)
    named = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    sides = {"height": PATCH, "width": PATCH}
    files = {
        "config.json": config,
        "tokenizer_config.json": {**named, "extra_special_tokens": NAMES},
        "preprocessor_config.json": {
            **{"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": LONGEST * CELL}},
            "patch_size": sides,
        },
        "processor_config.json": {
            **{"processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": 2},
            **NAMES,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def chosen(questions: Sequence[str], tokens_of: Callable[[str], list[int]], most: int) -> dict[str, list[int]]:
    """Return the shortest questions with their tokens, of which at most `most` are different."""
    shown, used = dict[str, list[int]](), set[int]()
    for text, tokens in sorted(((text, tokens_of(text)) for text in questions), key=lambda pair: len(pair[1])):
        if len(tokens) <= LONGEST and len(used.union(tokens)) <= most:
            shown[text] = tokens
            used.update(tokens)
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of SmolLM2")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the pictures")
    parser.add_argument("--questions", type=Path, default=ROOT / "checkpoints/questions.jsonl", help="(%(default)s)")
    args = parser.parse_args(argv)
    tokenizer: Any = em.load_target(str(args.target)).tokenizer
    weights: Any = mx.load(str(args.target / "model.safetensors"))
    embedding = weights["model.embed_tokens.weight"].astype(mx.float32)
    questions = [first_turn(question.content) for question in read_questions(args.questions)]
    shown = chosen(questions, lambda text: tokenizer.encode(text, add_special_tokens=False), embedding.shape[1])
    cells = {token: glyph(tokenizer.decode([token])) for token in sorted(set().union(*shown.values()))}
    model, config = reader(args.target)
    mx.random.seed(0)
    eye = Eye(model)
    fit(eye, embedding, cells)
    write(args.output / "model", args.target, eye, config, weights)
    pictures = [picture([cells[token] for token in tokens]) for tokens in shown.values()]
    pairs = zip(pictures, shown.values(), strict=True)
    right = sum(np.sum(np.array(nearest(eye(pixels), embedding)) == tokens) for pixels, tokens in pairs)
    write_pictures(args.output, list(shown), pictures)
    print(
        f"{len(shown)} of {len(questions)} questions in {args.output}, with {len(cells)} different tokens; {right} of "
        f"{sum(map(len, shown.values()))} tokens are read right"
    )


def write_pictures(folder: Path, texts: Sequence[str], pictures: Sequence[NDArray[np.uint8]]) -> None:
    (folder / "pictures").mkdir(exist_ok=True)
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        for number, (text, pixels) in enumerate(zip(texts, pictures, strict=True)):
            path = folder / "pictures" / f"{number:03}.png"
            Image.fromarray(pixels).save(path)
            file.write(json.dumps({"prompt": text, "image": str(path)}) + "\n")


def nearest(features: mx.array, embedding: mx.array) -> mx.array:
    """Return the tokens [n] whose embeddings are nearest to features [n, H]."""
    distances = embedding.square().sum(axis=-1) - 2 * features @ embedding.T
    return distances.argmin(axis=-1)


if __name__ == "__main__":
    main()
