"""The command `eagle-chat`: a conversation in the terminal, in which accepted draft tokens have another color."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import eagle_mlx as em
from eagle_mlx.command import Stop, Stopped, exit_code, read
from eagle_mlx.errors import EagleError, PromptError
from eagle_mlx.progress import counted
from eagle_mlx.request import Chunk, encode
from eagle_mlx.sampling_params import limit_of
from eagle_mlx.setting import setting
from eagle_mlx.text import common_prefix
from eagle_mlx.vision.images import ImageLimits, file_of

from .decoding_options import COLOR_HELP, DIM, DecodingOptions, SamplingOptions, has_color, painted, renderer

COMMANDS = """\
  /stats          tokens per forward and per second of this chat, and the length of the conversation
  /image FILE     show an image with the next question
  /clear          forget the conversation
  /system TEXT    replace the system prompt; without TEXT, show it
  /help           show these commands
  /exit           end the chat"""
EPILOG = f"""\
in the chat:
{COMMANDS}
  Ctrl-C stops an answer, Ctrl-D ends the chat.

examples:
  eagle-chat                                    the embedded target and head
  eagle-chat --target Qwen3-4B-4bit --system 'Answer in one sentence.' --temperature 0.7
  printf 'What is 2 + 3?\\nAnd times 4?\\n' | eagle-chat --quiet

Each line of standard input is a turn; lines that are pasted together into a terminal are one, if Python has GNU
readline. Answers go to standard output, everything else to standard error."""


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """Sampling of tokens, and the end of an answer."""

    max_tokens: int = setting(4096, "maximum new tokens", limit_of("max_tokens"))


@dataclass(frozen=True)
class ChatOptions(DecodingOptions):
    """A model to chat with."""

    color: bool = setting(True, COLOR_HELP)
    sampling: ChatSampling = field(default_factory=ChatSampling)


class Tally(Counter[str]):
    """Counts of one answer or of several: `tokens`, `drafted` ones that were accepted, and `rounds`.

    `timed` are the tokens after each answer's first chunk, and `nanoseconds` their time.
    """

    def count(self, chunk: Chunk, nanoseconds: int) -> None:
        """Count a chunk that came this long after the one before."""
        size = len(chunk.tokens)
        if self["tokens"]:
            self.update(timed=size, nanoseconds=nanoseconds)
        # A round ends with the target's own token, unless the text ended within its draft.
        rounds = chunk.from_draft.count(0) + chunk.from_draft.endswith(b"\1")
        self.update(tokens=size, drafted=sum(chunk.from_draft), rounds=rounds)

    def __str__(self) -> str:
        tokens, timed = self["tokens"], self["timed"]
        speed = f"{1e9 * timed / self['nanoseconds']:.1f} tokens/s" if timed else "too short for tokens/s"
        return f"τ {tokens / max(1, self['rounds']):.2f}, {speed}, {self['drafted']} of {tokens} tokens drafted"


class TerminalChat:
    def __init__(self, engine: em.Engine, options: ChatOptions):
        """Raises ConfigError for invalid sampling parameters, and PromptError if the model has no chat template."""
        tokenizer = engine.target.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise PromptError(f"{engine.target.name} has no chat template; use eagle-generate, which continues text")
        self.engine, self.tokenizer = engine, tokenizer
        self.options, self.params = options, options.params()
        self.color = options.color and has_color(sys.stdout)
        self.system, self.turns = options.system, list[dict[str, Any]]()
        self.images: list[dict[str, Any]] = []  # to show with the next question
        self.total = Tally()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def boundaries(self) -> list[int]:
        """Return the tokens that the prompts of this question and of the next one share, if the engine must know."""
        if not self.engine.wants_boundaries:
            return []
        turns = [{"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
        prompts = [encode(self.engine.target, messages) for messages in (self.messages, [*self.messages, *turns])]
        return [common_prefix(*prompts)]

    def stream(self) -> Generator[Chunk, None, None]:
        """Answer the messages. All work is done when the first chunk is asked for. Raises EagleError."""
        params = self.options.params_for(self.engine.target, self.messages)
        yield from self.engine.stream(self.messages, params, self.boundaries())

    def run(self) -> None:
        """Answer lines of standard input until it ends or the user leaves."""
        while (line := read_line()) is not None:
            first = line.split(maxsplit=1)[:1]
            if first and re.fullmatch("/[a-z]+", first[0]):
                try:
                    if not self.command(*line.split(maxsplit=1)):
                        return
                except EagleError as e:
                    note(f"error: {e}")
            elif first:
                self.answer(line)

    def answer(self, line: str) -> None:
        """Answer a turn, and print the answer and its figures. A turn that cannot be answered is forgotten."""
        content = [*self.images, {"type": "text", "text": line}] if self.images else line
        self.turns.append({"role": "user", "content": content})
        self.images = []
        tally, text, began, stop = Tally(), "", perf_counter_ns(), Stop()
        render = renderer(self.tokenizer, self.params.stop, self.color)
        try:
            with stop.listening(), stop.deferred(), closing(self.stream()) as chunks:
                for chunk in chunks:
                    print(render(chunk), end="", flush=True)
                    text += chunk.text
                    now = perf_counter_ns()
                    tally.count(chunk, now - began)
                    began = now
                    if chunk.output is not None and chunk.output.error is not None:
                        raise PromptError(chunk.output.error)
                    stop.check()
        except Stopped as e:
            if e.exit_code != Stopped(signal.SIGINT).exit_code:
                raise
        except EagleError as e:
            self.turns.pop()
            note(f"error: {e}" if not self.turns else f"error: {e}; /clear forgets the conversation")
            return
        print(flush=True)
        self.turns.append({"role": "assistant", "content": text})
        self.total.update(tally, answers=1)
        self.options.say(painted(str(tally), DIM) if self.color and has_color(sys.stderr) else str(tally))

    def command(self, name: str, text: str = "") -> bool:
        """Run a command of the chat. Return whether the chat goes on. Raises EagleError if it cannot be done."""
        match name:
            case "/exit":
                return False
            case "/image":
                self.show(text.strip())
            case "/clear":
                self.turns.clear()
                self.images.clear()
                note("the conversation is empty")
            case "/system":
                if text := text.strip():
                    encode(self.engine.target, [{"role": role, "content": text} for role in ("system", "user")])
                    self.system = text
                note(f"system prompt: {self.system or 'none'}")
            case "/stats":
                length = len(encode(self.engine.target, self.messages)) if self.turns else 0
                note(f"{self.total}, {counted(self.total['answers'], 'answer')}")
                note(f"the conversation has {length} of {self.engine.target.context_length} tokens")
            case "/help":
                note(COMMANDS)
            case _:
                note(f"unknown command {name}; the commands are\n{COMMANDS}")
        return True

    def show(self, file: str) -> None:
        """Add an image to the next question. Raises EagleError if the model cannot read it."""
        with suppress(ValueError, RuntimeError):
            if not Path(file).expanduser().exists():
                [file] = shlex.split(file)  # terminals write the path of a dragged file as for a shell
        image = {"type": "image", "image": file_of(file, ImageLimits())}
        encode(self.engine.target, [{"role": "user", "content": [*self.images, image]}])
        self.images.append(image)
        note(f"{counted(len(self.images), 'image')} with the next question")


def note(text: str) -> None:
    print(text, file=sys.stderr)


def edit_lines() -> None:
    """Let `input` edit lines and remember them. With GNU readline, pasted lines then are one line of input."""
    with suppress(ImportError):
        import_module("readline").parse_and_bind("set enable-bracketed-paste on")


def read_line() -> str | None:
    """Return the next line of standard input; None at its end. Raises PromptError if it is not UTF-8."""
    by_hand = sys.stdin.isatty()
    while True:
        try:
            return input("> " if by_hand and sys.stdout.isatty() else "")
        except EOFError:
            if by_hand:
                note("")
            return None
        except UnicodeDecodeError as e:
            raise PromptError(f"standard input cannot be read ({e}); give text in UTF-8") from e
        except KeyboardInterrupt:
            if not by_hand:
                raise
            note("\nCtrl-D or /exit ends the chat")


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-chat. Returns the exit status: 0, 2 for an error, or 130 if interrupted."""
    about = "Chat with a model in the terminal. Accepted draft tokens are green."
    return exit_code(lambda: _chat(read(ChatOptions, argv, "eagle-chat", about, EPILOG)))


def _chat(options: ChatOptions) -> None:
    chat = TerminalChat(options.engine(max_batch=1, cache_prefixes=True), options)
    if sys.stdin.isatty():
        edit_lines()
        options.say(f"{COMMANDS}\nCtrl-C stops an answer, Ctrl-D ends the chat.")
    chat.run()
