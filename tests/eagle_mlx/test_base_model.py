"""Names of a model: saved knowledge is found by any of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import names_of, same_model
from tests import hub_server

CARD = b"---\nbase_model: Qwen/Qwen3-8B\n---\n"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "qwen/qwen3-8b",
        "Qwen/Qwen3-8B-MLX-4bit",
        "Qwen3-8B-4bit",
        "mlx-community/Qwen3-8B-bf16",
        "mlx-community/Qwen3-8B-4bit-DWQ-053125",
        "mlx-community/Qwen3-8B-mxfp4",
        "mlx-community/Qwen3-8B-MLX-4.5bpw",
        "mlx-community/Qwen3-8B-6bit-gs32",
    ],
)
def test_conversions_are_recognized_by_their_names(name: str) -> None:
    assert same_model(name, "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-80B", "someone/Qwen3-8B", "mlx-community/Qwen3-8B-abliterated-4bit", ""]
)
def test_other_models_are_not(name: str) -> None:
    assert not same_model(name, "Qwen/Qwen3-8B")


def test_metas_first_names() -> None:
    assert same_model("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "meta-llama/Llama-3.1-8B-Instruct")
    assert not same_model("mlx-community/Llama-3.1-8B-4bit", "meta-llama/Llama-3.1-8B-Instruct")
    assert same_model("mlx-community/gpt-oss-20b-MXFP4-Q8", "openai/gpt-oss-20b")


def folder_of(path: Path, config: dict[str, object], card: bytes | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if card is not None:
        (path / "README.md").write_bytes(card)
    return path


def test_a_conversion_names_its_base_model(tmp_path: Path) -> None:
    quantized: dict[str, object] = {"quantization": {"bits": 4}}
    assert names_of(folder_of(tmp_path / "mine", quantized, CARD)) == ("mine", "Qwen/Qwen3-8B")
    assert names_of(folder_of(tmp_path / "noted", {"base_model": "Qwen/Qwen3-8B"})) == ("noted", "Qwen/Qwen3-8B")
    assert names_of(folder_of(tmp_path / "tuned", {}, CARD)) == ("tuned",)
    assert names_of(folder_of(tmp_path / "silent", quantized)) == ("silent",)


def test_a_models_card_is_fetched_with_it_and_no_request_follows(online: hub_server.Hub) -> None:
    files = {"README.md": CARD, "config.json": b"{}", "model.safetensors": b"x"}
    online.put("mlx-community/renamed-4bit", files)
    assert names_of("renamed-4bit") == ("mlx-community/renamed-4bit",)
    assert online.requests == []
    hub.resolve("renamed-4bit")
    requests = len(online.requests)
    assert names_of("renamed-4bit") == ("mlx-community/renamed-4bit", "Qwen/Qwen3-8B")
    assert len(online.requests) == requests
