"""What images need of mlx-vlm without its promise. If a test fails, images of that family end with an error.

`tests/eagle_mlx/test_vision.py` compares what it computes with its own decoding.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from eagle_mlx.vision.tower import FAMILIES

utils = pytest.importorskip("mlx_vlm.utils")


def test_a_model_is_loaded_without_its_weights() -> None:
    """Else the weights of the text model are read twice."""
    assert {"model_path", "lazy"} <= set(inspect.signature(utils.load_model).parameters)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_a_processor_and_returns_embeddings(family: str) -> None:
    module, _, name = FAMILIES[family].processor.rpartition(".")
    processor = getattr(importlib.import_module(f"mlx_vlm.models.{module}"), name)
    assert callable(processor.from_pretrained)
    model = importlib.import_module(f"mlx_vlm.models.{family}").Model
    taken = inspect.signature(model.get_input_embeddings).parameters
    assert {"input_ids", "pixel_values"} <= set(taken)
    assert "mask" in taken or any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())


@pytest.mark.parametrize("field", ["inputs_embeds", "deepstack_visual_embeds"])
def test_embeddings_come_with_those_of_further_layers(field: str) -> None:
    """Else Qwen3-VL sees less of an image."""
    features = importlib.import_module("mlx_vlm.models.base").InputEmbeddingsFeatures
    assert field in inspect.signature(features).parameters
