"""A text's size gives a lower bound of its tokens for any text and tokenizer, or no bound is given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from eagle_mlx.serve.api.limits import TokenSize, token_size
from tests.fakes import EMBEDDED_TARGET

CORPUS = ["def f(x):\n        return x", "한국어 문장 각각", "naïve café Ǻ", "the end of the text " * 3, "   " * 20] * 3
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def sentencepiece(model: Any = None, **flags: Any) -> Tokenizer:
    """Return a tokenizer like Llama's: spaces become a letter, and unknown characters become bytes."""
    made = Tokenizer(model or models.BPE(unk_token="<unk>", fuse_unk=True, **flags))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *BYTES], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def with_stripping_token() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    return made


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "embedded": lambda: load_tokenizer(EMBEDDED_TARGET).backend_tokenizer,
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "sentencepiece": lambda: sentencepiece(byte_fallback=True),
    "stripping token": with_stripping_token,
}
SIZES = {name: (made := make(), token_size(SimpleNamespace(backend_tokenizer=made))) for name, make in BOUNDED.items()}  # type: ignore[arg-type]
PIECES = st.sampled_from(
    [
        "\u1112\u1161\u11ab",
        "\u212b\u0301",
        "\u2126\u0313\u0300\u0345",
        "\u212a",
        "<|user|>",
        "<|im_end|>",
        "  " * 30,
        "the end of the text ",
        "\n\t ",
        "\u3000",
        "🦅",
        "\0",
        "é",
    ]
)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.lists(PIECES | st.text(max_size=20)).map("".join))
def test_no_text_has_fewer_tokens_than_its_size_says(name: str, text: str) -> None:
    tokenizer, size = SIZES[name]
    assert size is not None
    assert size.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_of_use() -> None:
    size = SIZES["embedded"][1]
    assert size == TokenSize(45)  # a line break and 44 spaces
    assert size.least_tokens("x" * 45_000) == 1000


@pytest.mark.parametrize(
    "tokenizer",
    [
        sentencepiece(),  # runs of unknown characters are one token
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE()),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace("x", "")),
        byte_level(normalizers.NFKC()),
        object(),
    ],
    ids=lambda each: type(getattr(each, "model", each)).__name__,
)
def test_where_nothing_bounds_a_token_nothing_is_said(tokenizer: Any) -> None:
    assert token_size(SimpleNamespace(backend_tokenizer=tokenizer)) is None  # type: ignore[arg-type]
