"""What the project uses of mlx-lm, MLX, transformers and huggingface_hub without their promise.

Each test names what breaks if it fails. CONTRIBUTING.md says what to do then; a workflow runs this file every night
with the newest versions and with mlx-lm's main branch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from importlib.metadata import version
from pathlib import Path

import mlx
import mlx_lm.models
import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _xet
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer
from transformers import PreTrainedTokenizerBase

from eagle_mlx.adapters import ChatTokenizer
from eagle_mlx.cache.kinds import MASKED, ONE_ROW, OWN_POSITIONS, REFUSED
from eagle_mlx.formats.mtp_layers import FILES
from eagle_mlx.heads.mtp.head import LAYERS
from eagle_mlx.text import template_args

TARGET = Path(__file__).parent.parent / "checkpoints" / "target"
ROOT = Path(__file__).parent.parent


def used_names() -> list[tuple[str, str]]:
    """Return (module, name) for each `from mlx_lm… import name` and `mlx_lm.name`, without repetition."""
    names = set()
    for source in ("eagle_mlx", "train", "serve", "data_pipelines"):
        for file in (ROOT / source).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "mlx_lm" in text else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
                    names |= {(str(node.module), alias.name) for alias in node.names}
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mlx_lm":
                    names.add(("mlx_lm", node.attr))
    return sorted(names)


@pytest.mark.parametrize(("module", "name"), used_names())
def test_it_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_enough_was_found() -> None:
    assert {("mlx_lm", "load"), ("mlx_lm", "stream_generate"), ("mlx_lm.models.cache", "KVCache")} <= set(used_names())


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (mlx_lm.stream_generate, {"max_tokens", "draft_model", "stream"}),
        (mlx_lm.batch_generate, {"max_tokens", "return_token_ids"}),
        (KVCache.update_and_fetch, {"keys", "values"}),
    ],
)
def test_it_takes_what_it_is_given(function: object, parameters: set[str]) -> None:
    assert parameters <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_attention_takes_what_our_hooks_pass_on() -> None:
    """Else a model's attention raises TypeError once `eagle_mlx.hooks` has wrapped it."""
    ours = {"queries", "keys", "values", "cache", "scale", "mask", "sinks"}
    assert set(inspect.signature(base.scaled_dot_product_attention).parameters) == ours
    for file in Path(mlx_lm.models.__file__ or "").parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "scaled_dot_product_attention":
                assert {keyword.arg for keyword in node.keywords} <= ours, file.name


@pytest.mark.parametrize("name", sorted({*ONE_ROW, *OWN_POSITIONS, *REFUSED, *MASKED, *LAYERS, *FILES.values()}))
def test_every_model_file_in_our_tables_exists(name: str) -> None:
    """Else the table's entry is silently without effect: a model decodes in a way that is not exact."""
    assert importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def test_the_wrapper_of_a_tokenizer_holds_it_and_keeps_its_own_state() -> None:
    """Else loss masks by tags, `Chat.tokens` and `--chat-template-args` raise AttributeError."""
    tokenizer = load_tokenizer(TARGET)
    assert isinstance(vars(tokenizer)["_tokenizer"], PreTrainedTokenizerBase)
    assert ChatTokenizer(tokenizer, {"x": 1}).eos_token_ids == tokenizer.eos_token_ids
    assert template_args(ChatTokenizer(tokenizer, {"x": 1})) == {"x": 1}


def test_a_plain_tokenizer_keeps_the_methods_of_the_base_class() -> None:
    """Else the server encodes every chat whole, and texts are no longer shared at their messages' boundaries."""
    kind = type(vars(load_tokenizer(TARGET))["_tokenizer"])
    for name in ("__call__", "encode", "apply_chat_template"):
        assert getattr(kind, name) is getattr(PreTrainedTokenizerBase, name)
    rendering = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"} <= set(rendering)


def test_the_base_of_the_hubs_errors_is_that_of_a_failed_connection() -> None:
    """Else a hub that cannot be reached ends a command with a traceback."""
    [transport, *_] = HfHubHTTPError.__bases__
    library = sys.modules[transport.__module__.partition(".")[0]]
    assert issubclass(library.ConnectError, transport)
    assert issubclass(library.TimeoutException, transport)


def test_downloads_of_xet_can_be_ended() -> None:
    """Else Ctrl-C waits until the files of a model are whole."""
    _xet.abort_xet_session()


def test_mlx_reads_the_width_of_its_graph_walk() -> None:
    """Else training on a CPU with several streams is slower: `eagle_mlx.cpu.tune_process` sets it for nothing."""
    libraries = [file for folder in mlx.__path__ for file in (Path(folder) / "lib").glob("libmlx.*")]
    assert any(b"MLX_BFS_MAX_WIDTH" in file.read_bytes() for file in libraries)


def test_the_versions_are_the_ones_pinned() -> None:
    assert [version(name).split(".")[:2] for name in ("mlx", "mlx-lm")] == [["0", "32"]] * 2
