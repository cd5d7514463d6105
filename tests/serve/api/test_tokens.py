"""Single tokens: their bytes join to the text's bytes, even if they split characters."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from eagle_mlx.serve.api.logprobs import TokenTexts
from tests.fakes import tiny_target

TOKENIZER = tiny_target(tokenizer=True).tokenizer
assert TOKENIZER is not None
TEXTS = TokenTexts(TOKENIZER)


@given(st.text(max_size=20))
@example("naïve 🦅 ")
def test_bytes_make_up_the_text(text: str) -> None:
    assert TOKENIZER is not None
    pieces = [TEXTS[token] for token in TOKENIZER.encode(text)]
    assert b"".join(raw for _, raw in pieces) == text.encode()


def test_no_two_tokens_look_the_same() -> None:
    names = [TEXTS[token][0] for token in range(4096)]
    assert len(set(names)) == len(names)
    assert TEXTS[223] == ("bytes:\\xf0", b"\xf0") or any(name.startswith("bytes:\\xf0") for name in names)
