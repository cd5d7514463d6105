"""Text streams: nothing too early, nothing lost, whatever the cuts between tokens."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from eagle_mlx.streaming import TextStream, held_back
from tests.fakes import tiny_target

TOKENIZER = tiny_target(tokenizer=True).tokenizer
PIECES = st.lists(st.integers(1, 5), min_size=1)


@given(st.text(max_size=40), PIECES)
@example("naïve 🦅 ", [1])
@example(" a\x00b", [1])
def test_pieces_make_up_the_text(text: str, sizes: list[int]) -> None:
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
def test_what_may_become_a_stop_string_waits(text: str, stop: list[str]) -> None:
    held = held_back(text, stop)
    starts = {s[:n] for s in stop for n in range(1, len(s))}
    assert held == max((len(start) for start in starts if text.endswith(start)), default=0)
