"""What the processes hold that encode long texts: the backend of a tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer


class EncoderProcess:
    """The questions that such a process answers (`process_program.py`)."""

    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None

    def open(self, tokenizer: str, split_special_tokens: bool) -> None:
        """Read the backend, which transformers tells before each text neither to pad nor to cut it."""
        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = split_special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        assert self.tokenizer is not None
        # The fast way leaves out where in the text each token stands, which nobody asks for: half the work.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)
