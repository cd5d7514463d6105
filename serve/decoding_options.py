"""Common parts of `eagle-generate` and `eagle-chat`: settings, and text with accepted draft tokens in another color."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TextIO

import eagle_mlx as em
from eagle_mlx import blas
from eagle_mlx.errors import loading
from eagle_mlx.extras import require
from eagle_mlx.request import Chunk, Prompt, draft_runs, encode
from eagle_mlx.sampling_params import SamplingParams, limit_of
from eagle_mlx.setting import AT_LEAST_0, Group, setting
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.text import TextStream

from .speculation import TARGET_HELP, THINKING, MemoryOptions, Speculation, load_proposer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

GREEN, DIM = 32, 2  # codes of ANSI escape sequences (ECMA-48, section 8.3.117)
COLOR_HELP = "show accepted drafts in green; not if the output is no terminal, or if NO_COLOR is set"


def _parameter(name: str, help: str) -> Any:
    """Return the setting of a sampling parameter, with its default and limits."""
    return setting(getattr(SamplingParams, name), help, limit_of(name))


@dataclass(frozen=True)
class SamplingOptions(Group):
    """Sampling of tokens, and the end of the text."""

    max_tokens: int = _parameter("max_tokens", "maximum new tokens")
    temperature: float = _parameter("temperature", "0 is greedy")
    top_k: int = _parameter("top_k", "0 keeps all tokens")
    top_p: float = _parameter("top_p", "1 keeps all tokens")
    min_p: float = _parameter("min_p", "0 keeps all tokens")
    repetition_penalty: float = _parameter("repetition_penalty", "1 for no penalty")
    presence_penalty: float = _parameter("presence_penalty", "0 for no penalty")
    frequency_penalty: float = _parameter("frequency_penalty", "0 for no penalty")
    stop: tuple[str, ...] = setting((), "stop before this text; repeatable", metavar="TEXT", repeat=True)
    seed: int | None = _parameter("seed", "seed that makes sampled text repeatable")
    ignore_eos: bool = setting(False, "continue after the model's end-of-text token")


@dataclass(frozen=True)
class DecodingOptions(Group):
    """A model, and how it decodes."""

    kv_bits: Literal[4, 8] | None = setting(None, "quantize the KV cache to this many bits")
    system: str | None = setting(None, "system prompt", metavar="TEXT")
    thinking_budget: int | None = setting(None, THINKING, AT_LEAST_0)
    quiet: bool = setting(False, "print only the text")
    target: str | None = setting(None, TARGET_HELP, metavar="MODEL")
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    speculation: Speculation = field(default_factory=Speculation)
    loading: TargetOptions = field(default_factory=TargetOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    def params(self) -> SamplingParams:
        """Return the parameters for the engine. Raises ConfigError for a value out of range."""
        return SamplingParams(**self.sampling.flat(), **self.speculation.rule)

    def params_for(self, target: em.Target, prompt: Prompt) -> SamplingParams:
        """Return the parameters of one prompt, with the limit on its thought. Raises PromptError."""
        if self.thinking_budget is None:
            return self.params()
        from .chat import ChatFormat, with_budget  # needs the extra

        form = ChatFormat.of(target)
        is_open = form.starts_in_reasoning(encode(target, prompt))
        grammar = with_budget(form, target.vocab_size, self.thinking_budget, is_open)
        return replace(self.params(), grammar=grammar)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr)

    def engine(self, max_batch: int, cache_prefixes: bool = False) -> em.Engine:
        """Load the models and return an engine. Raises EagleError."""
        from eagle_mlx.memory import prefix_cache_bytes

        from .prompts import remember

        if self.thinking_budget is not None:
            require("--thinking-budget", "serve", "llguidance")
        name, speculation = self.speculation.for_target(self.target)
        self.say(f"blas: {blas.activate()}")
        with loading(name):
            target = self.loading.load(name)
            speculation, proposer = load_proposer(speculation, target, name, self.say)
            self.loading.wire_active()
            prefixes = prefix_cache_bytes(target.free_memory) if cache_prefixes else 0
            more = {"max_batch": max_batch, "kv_bits": self.kv_bits, "prefix_cache_bytes": prefixes}
            engine = speculation.engine(target, proposer, self.memory, **more)
            remember(speculation.memory_texts, engine, self.say)
        self.say("\n".join([f"target: {target.name}", f"speculation: {speculation}", *speculation.notes(engine)]))
        return engine


def has_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colors, and the user has not set NO_COLOR (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text else ""


def renderer(tokenizer: TokenizerWrapper | None, stop: Sequence[str], color: bool) -> Callable[[Chunk], str]:
    """Return a function that turns chunks of a stream into text, if `color` with accepted draft tokens in green.

    stop: the request's stop strings. A character of several tokens has the color of its last token.
    """
    if not color or tokenizer is None:
        return attrgetter("text")
    texts = TextStream(tokenizer, stop)

    def render(chunk: Chunk) -> str:
        pieces = []
        for part, drafted in draft_runs(chunk.from_draft):
            is_last = chunk.output is not None and part.stop == len(chunk.tokens)
            text = texts.finish(chunk.output.text) if is_last and chunk.output else texts.push(chunk.tokens[part])
            pieces.append(painted(text, GREEN) if drafted else text)
        return "".join(pieces)

    return render
