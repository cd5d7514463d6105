"""Streams of text: nothing too early and nothing lost, for any tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from eagle_mlx.text import IncrementalText, StopStrings, TextStream, held_back
from tests.fakes import tiny_target
from tests.full import some

TOKENIZER = tiny_target(tokenizer=True).tokenizer
PIECES = st.lists(st.integers(1, 5), min_size=1)


@given(st.text(max_size=40), PIECES)
@example("naïve 🦅 ", [1])
@example(" a\x00b", [1])
def test_streamed_pieces_add_up_to_the_text(text: str, sizes: list[int]) -> None:
    assert TOKENIZER is not None
    tokens, stream, shown, at = TOKENIZER.encode(text), TextStream(TOKENIZER), "", 0
    whole = TOKENIZER.decode(tokens)
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        shown += stream.push(tokens[at : at + size])
        assert whole.startswith(shown)
        at += size
    assert shown + stream.finish(whole) == whole


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_possible_start_of_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    held = held_back(text, stop)
    starts = {s[:n] for s in stop for n in range(1, len(s))}
    assert held == max((len(start) for start in starts if text.endswith(start)), default=0)


def byte_tokens() -> list[int]:
    """Return the tokens of single bytes, by byte, without bytes that never occur in text."""
    assert TOKENIZER is not None
    texts = {TOKENIZER.decode([token]): token for token in range(TOKENIZER.vocab_size)}
    tokens = {text.encode()[0]: token for text, token in texts.items() if len(text.encode()) == 1}
    for character in "é—🦅ñ한߷":
        encoded = TOKENIZER.encode(character, add_special_tokens=False)
        if len(encoded) == len(character.encode()):
            tokens |= dict(zip(character.encode(), encoded, strict=True))
    return sorted(tokens.values())


BYTES = byte_tokens()
ANY = st.one_of(
    st.lists(st.sampled_from(BYTES), max_size=40),
    st.lists(st.sampled_from([t for t in BYTES if TOKENIZER and TOKENIZER.decode([t]) == "\ufffd"]), max_size=40),
    st.lists(st.integers(0, 4095), max_size=40),
    st.lists(st.one_of(st.sampled_from(BYTES), st.integers(0, 5000)), max_size=60),
)
"""Any tokens, including parts of characters and ids that the tokenizer does not have."""


@settings(max_examples=some(300))
@given(ANY, st.integers(0, 60), st.integers(1, 6), PIECES)
def test_streams_equal_the_text_and_stop_at_every_stop_string(
    tokens: list[int], start: int, length: int, sizes: list[int]
) -> None:
    assert TOKENIZER is not None
    texts = [TOKENIZER.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    whole = texts[-1]
    assume(whole)
    stop = (whole[start % len(whole) :][:length], "\x00never")
    end = next(count for count, text in enumerate(texts) if stop[0] in text)
    watch, decoder = StopStrings(stop), IncrementalText(TOKENIZER)
    assert [watch.complete(*decoder.add([token])) for token in tokens[:end]] == [False] * (end - 1) + [True]
    stream, shown, at = TextStream(TOKENIZER, stop), "", 0
    final, _ = watch.cut(texts[end])
    while at < end:
        size = sizes[at % len(sizes)]
        at += size
        shown += stream.push(tokens[at - size : at]) if at < end else stream.finish(final)
    assert shown == final
    stream, shown = TextStream(TOKENIZER), ""
    for token in tokens:
        shown += stream.push([token])
        assert whole.startswith(shown)
    assert shown + stream.finish(whole) == whole


def test_invalid_bytes_are_shown_and_not_decoded_again() -> None:
    """At any length: little is decoded again, and certain text is not held back."""
    assert TOKENIZER is not None
    rng = np.random.default_rng(0)
    tail = [token for token in BYTES if TOKENIZER.decode([token]) == "\ufffd"]
    tokens = [int(token) for token in rng.choice(tail, 400)]
    stream, decoder, shown = TextStream(TOKENIZER), IncrementalText(TOKENIZER), ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push([token])
        decoder.add([token])
        assert len(decoder.window) < 20
        assert len(TOKENIZER.decode(tokens[:count])) - len(shown) < 8
    assert TOKENIZER.decode(tokens).startswith(shown)
