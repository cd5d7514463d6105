"""Long texts are encoded piece by piece, with the tokens of the whole text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle_mlx.serve.api import encoding
from eagle_mlx.serve.api.encoding import Encoder
from tests.fakes import embedded_tokenizer
from tests.full import in_full, in_turn

PIECE = in_full(encoding.PIECE, encoding.PIECE // 8)
"""Shorter than the server's pieces, so that shorter texts have several."""
RNG = random.Random(1)
SOURCE = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
PARTS = ["foo", "  ", " ", "\n", "\n\n", "7", "é", "漢", "👍🏽", "}", "\t", "'s", "<s>", " bar", "</s> "]
TEXTS = {
    "code": SOURCE[: 5 * PIECE],
    "parts": "".join(RNG.choice(PARTS) for _ in range(PIECE * 11 // 8)),
    "spaces": " " * (PIECE * 9 // 4) + "x" + " " * (PIECE * 9 // 4 + 1),
    "lines": "\n" * (PIECE * 9 // 4 + 1),
    "digits": "7" * (PIECE * 9 // 4 + 1),
    "letters": "a" * PIECE + "b" * (PIECE * 5 // 4),
    "chinese": "".join(chr(RNG.randint(0x4E00, 0x9FFF)) for _ in range(PIECE * 9 // 4)),
    "emoji": "👩‍👩‍👧‍👦é" * (PIECE * 9 // 32),
}
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made


def llama() -> Tokenizer:
    """Return a tokenizer that puts a space before the text, and falls back to bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def gemma() -> Tokenizer:
    """Return a tokenizer that merges across words."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def trained(made: Tokenizer) -> TokenizerWrapper:
    """Return a tokenizer with a vocabulary, which begins and ends texts with special tokens."""
    special: Any = ["<unk>", "<s>", "</s>"]
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any = {
        "BPE": lambda: trainers.BpeTrainer(vocab_size=1500, special_tokens=[*special, *alphabet[256:]]),
        "Unigram": lambda: trainers.UnigramTrainer(vocab_size=900, special_tokens=special, unk_token="<unk>"),
        "WordPiece": lambda: trainers.WordPieceTrainer(vocab_size=1500, special_tokens=special),
    }[type(made.model).__name__]()
    made.train_from_iterator(SOURCE[: in_full(200_000, 50_000)].splitlines(keepends=True), trainer)
    ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE", PIECE)


@pytest.fixture(scope="module", params=[byte_level, llama, gemma, unigram, words], ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> TokenizerWrapper:
    return trained(request.param())


@pytest.mark.parametrize("name", in_turn(TEXTS, of=3))
def test_pieces_have_the_tokens_of_the_whole_text(tokenizer: TokenizerWrapper, name: str) -> None:
    text = TEXTS[name]
    assert len(text) >= 2 * PIECE
    for special in (False, True):
        assert Encoder(tokenizer, lambda: None)(text, special) == tokenizer.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("name", ["code", "parts", "chinese"])
def test_a_text_is_encoded_in_pieces(name: str) -> None:
    """An error between them ends the work."""
    tokenizer, calls = embedded_tokenizer(), 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Encoder(tokenizer, check)(TEXTS[name], False)
    Encoder(tokenizer, check)(TEXTS[name], False)
    assert calls - 3 >= len(TEXTS[name]) // PIECE
