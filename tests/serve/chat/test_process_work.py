"""Forced texts are encoded literally, however the tokenizer encodes such text in a prompt."""

from __future__ import annotations

import string

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from eagle_mlx.serve.chat.process_work import MatcherProcess, Refused, literal

TAGS = ("<b>", "</b>", "<|end|>", "[INST]")
LETTERS = [*string.printable, "▁"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """Return a tokenizer whose merges make two of the special tokens, as converters of other formats write them."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["<b></b><b>bold</b>"] * 9, trainer)
    assert {"<b>", "</b>"} <= made.get_vocab().keys()
    return made


def sentencepiece(model: models.Model) -> Tokenizer:
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def bpe() -> models.BPE:
    pieces = ["<unk>", *BYTES, *LETTERS, "<b", "<b>"]
    merges = [("<", "b"), ("<b", ">")]
    vocab = {text: token for token, text in enumerate(dict.fromkeys(pieces))}
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def unigram() -> models.Unigram:
    pieces = ["<unk>", "<b>", *BYTES, *LETTERS]
    return models.Unigram([(text, -1.0) for text in dict.fromkeys(pieces)], 0, True)


KINDS = {"byte level": byte_level(), "BPE": sentencepiece(bpe()), "Unigram": sentencepiece(unigram())}
PIECES = st.sampled_from([*TAGS, "<unk>", "e\u0301", "\ufb01", "\u2126", " ", "  ", "<", "b>", "A", "é", "漢"])


@pytest.mark.parametrize("name", KINDS)
@given(text=st.lists(PIECES).map("".join))
def test_no_text_is_encoded_as_special_tokens_or_as_another_text(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    tokenizer.add_special_tokens([AddedToken(tag, lstrip=True, rstrip=True) for tag in (*TAGS, "<unk>")])
    made = llguidance.LLTokenizer(literal(tokenizer.to_str()), eos_token=[tokenizer.token_to_id("<|end|>")])
    tokens = made.tokenize_str(text)
    assert made.decode_bytes(tokens) == text.encode()
    assert not any(map(made.is_special_token, tokens))
    assert all(made.is_special_token(tokenizer.token_to_id(tag)) for tag in TAGS)
    assert made.vocab_size == tokenizer.get_vocab_size()


SPARSE = ["<end>", "a", "b"]
"""There is no x, so a grammar that requires one is a dead end."""
END, A, B = range(3)


def followed(grammar: str) -> MatcherProcess:
    tokenizer = sentencepiece(models.BPE({text: token for token, text in enumerate(SPARSE)}, []))
    tokenizer.add_special_tokens([AddedToken("<end>")])
    process = MatcherProcess()
    process.open(tokenizer.to_str(), len(SPARSE), [END])
    process.compile(grammar, ())
    return process


def tokens_of(masks: list[bytes]) -> list[list[int]]:
    return [[token for token in range(len(SPARSE)) if mask[0] >> token & 1] for mask in masks]


def test_a_dead_end_in_a_draft_does_not_end_the_text() -> None:
    """A dead end in a draft does not affect a text that continues differently."""
    process = followed('start: "a" ("b" "x" | "a" "b" "x"?)')
    assert tokens_of(process.masks(0, [A], [B, A])) == [[A, B], []]
    assert tokens_of(process.masks(0, [], [A, B])) == [[A, B], [B], [END]]
    assert tokens_of(process.masks(0, [A], [])) == [[B]]
    assert tokens_of(process.masks(1, [A, B], [])) == [[END]]


def test_a_text_in_a_dead_end_is_not_complete() -> None:
    process = followed('start: "a" ("b" "x" | "a" "b")')
    with pytest.raises(Refused):
        process.masks(0, [A, B], [])
