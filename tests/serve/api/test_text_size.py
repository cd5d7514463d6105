"""The most bytes that one token can stand for give a lower bound on a text's tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from eagle_mlx.serve.api.limits import token_bytes
from tests.fakes import EMBEDDED_TARGET

CORPUS = ["def f(x):\n        return x", "한국어 문장 각각", "naïve café Ǻ", "the end of the text " * 3, "   " * 20] * 3


def byte_level(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def with_stripping_token() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    return made


def bytes_of(tokenizer: object) -> int | None:
    return token_bytes(SimpleNamespace(backend_tokenizer=tokenizer))  # type: ignore[arg-type]


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "embedded": lambda: load_tokenizer(EMBEDDED_TARGET).backend_tokenizer,
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
}
SIZES = {name: (made := make(), bytes_of(made)) for name, make in BOUNDED.items()}
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
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    tokenizer, most = SIZES[name]
    assert most is not None
    assert -(-len(text.encode()) // most) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_bound_of_the_embedded_target() -> None:
    assert SIZES["embedded"][1] == 45  # a line break and 44 spaces


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE()),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace("x", "")),
        byte_level(normalizers.NFKC()),
        byte_level(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        with_stripping_token(),
        object(),
    ],
    ids=lambda each: type(getattr(each, "model", each)).__name__,
)
def test_without_a_bound_the_result_is_none(tokenizer: Any) -> None:
    assert bytes_of(tokenizer) is None
