"""What an engine gives back: a request's text with its counts, whole or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.request import Request, TokenLogprob


@dataclass(frozen=True)
class Output:
    """What became of one request."""

    text: str
    tokens: list[int]
    """With the stop token, or the one that completed a stop string, where one was emitted."""
    finish_reason: str
    """`stop`, `length`, `cancelled` or `error`."""
    prompt_tokens: int
    rounds: int
    """Target forwards that emitted tokens."""
    drafted: int
    accepted: int
    """Draft tokens that were accepted and emitted."""
    drafted_by_position: list[int]
    """Rounds in which a draft token stood at each position."""
    accepted_by_position: list[int]
    """Rounds in which the draft token at each position was accepted."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens, where the request asked."""
    lossless: bool = True
    """False where the request chose `threshold` acceptance, by which drafts change the text."""
    cached_tokens: int = 0
    """Prompt tokens that were not read again, because an earlier request began with them."""
    error: str | None = None
    """What went wrong with this request alone, where the finish reason is `error`."""
    refused: bool = False
    """Whether that is about what the request asked for, such as a grammar too complex to follow."""
    cut_off: str | None = None
    """What ended it though there was more to say, such as `time`."""
    stop: str | None = None
    """The stop string that ended the text, which does not hold it."""

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted per target forward, bonus tokens included; 0 where nothing was decoded."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0

    @classmethod
    def of(cls, request: Request, tokenizer: TokenizerWrapper | None) -> Output:
        """What a row has come to so far; without a tokenizer the text is empty."""
        tokens = request.tokens
        shown = tokens[:-1] if tokens and tokens[-1] in request.stop_ids else tokens
        text = tokenizer.decode(shown) if tokenizer is not None else ""
        text, stop = request.stops.cut(text) if request.stops else (text, None)
        return cls(
            text=text,
            tokens=tokens,
            finish_reason=request.finish_reason or "length",
            prompt_tokens=len(request.prompt),
            rounds=request.rounds,
            drafted=sum(request.drafted_by_position),
            accepted=sum(request.accepted_by_position),
            drafted_by_position=request.drafted_by_position,
            accepted_by_position=request.accepted_by_position,
            logprobs=request.logprobs if request.params.wants_logprobs else None,
            lossless=request.params.lossless,
            cached_tokens=request.cached_tokens,
            error=request.error,
            refused=request.refused,
            cut_off=request.cut_off,
            stop=stop,
        )


@dataclass(frozen=True)
class Chunk:
    """What one round added to a streamed text."""

    text: str
    """Text that is certain: half a character waits for the rest, and so does what may become a stop string."""
    tokens: list[int]
    output: Output | None
    """The whole, with the last chunk."""
