"""The command `eagle-generate`: answers one prompt, or a file of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import eagle_mlx as em
from eagle_mlx.command import exit_code, read
from eagle_mlx.errors import OutputError, PromptError
from eagle_mlx.files import PART, check_file, sync
from eagle_mlx.progress import progress_bar
from eagle_mlx.request import Prompt as EnginePrompt
from eagle_mlx.setting import AT_LEAST_1, setting

from .decoding_options import COLOR_HELP, DecodingOptions, has_color, renderer
from .prompts import Question, read_questions

if TYPE_CHECKING:
    from eagle_mlx.request_state import RequestState

EPILOG = """\
examples:
  eagle-generate 'def median(values):'                        the embedded target and head
  eagle-generate --target Qwen3-4B-4bit 'Why is the sky blue?'            with the best known head
  eagle-generate --target Qwen3-4B-4bit --head user/head 'Why is the sky blue?'
  eagle-generate --target Qwen3.5-9B-4bit --image screenshot.png 'What is wrong here?'
  git diff | eagle-generate --target Qwen3-4B-4bit --spec-decode ngram --system 'Review this change.' -
  eagle-generate --file prompts.jsonl --output answers.jsonl --batch 8

The text goes to standard output, everything else to standard error. Text with the same seed does
not depend on drafts or on other prompts. Without a seed, sampled text follows the model's own distribution."""


@dataclass(frozen=True)
class GenerateOptions(DecodingOptions):
    """Prompts, and how to answer them."""

    text: str | None = setting(None, "prompt for the model; `-` reads standard input", name="PROMPT", positional=True)
    flagged: str | None = setting(None, "the same as PROMPT", name="prompt", metavar="TEXT")
    image: tuple[Path, ...] = setting((), "image to show before the prompt; repeatable", metavar="FILE", repeat=True)
    file: Path | None = setting(None, "prompts: rows with `messages`, `prompt` or `turns`", metavar="FILE.jsonl")
    output: Path | None = setting(None, "file for answers (default: standard output)", metavar="FILE.jsonl")
    batch: int = setting(8, "prompts to decode together, with --file", AT_LEAST_1)
    raw: bool = setting(False, "do not apply the chat template to the prompt")
    color: bool = setting(False, COLOR_HELP)

    def _check(self) -> None:
        if [self.text, self.flagged, self.file].count(None) != 2:
            raise PromptError("give one prompt, `-` to read it from standard input, or a --file of prompts")
        if self.file is None and self.output is not None:
            raise OutputError("--output needs --file; the answer to a single prompt is printed")
        if self.output is not None:
            if self.output.is_file():
                raise OutputError(f"{self.output} exists already; name another file")
            check_file(self.output)
        if self.image and self.raw:
            raise PromptError("--image needs a chat template; leave out --image or --raw")
        for name in ("system", "image", "raw", "color"):
            if self.file is not None and getattr(self, name):
                raise PromptError(f"--{name} is for a single prompt; leave out --{name} or --file")

    @property
    def prompt(self) -> str:
        return self.text or self.flagged or ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-generate. Returns the exit status: 0, 2 for an error, or 130 if interrupted."""
    about = "Generate text with speculative decoding: the same text as without it, but faster."
    return exit_code(lambda: _generate(read(GenerateOptions, argv, "eagle-generate", about, EPILOG)))


def _generate(options: GenerateOptions) -> None:
    params = options.params()
    questions = None if options.file is None else read_questions(options.file)
    engine = options.engine(options.batch)
    began = perf_counter()
    outputs = _single(engine, options, params) if questions is None else _many(engine, options, params, questions)
    options.say(summary(outputs, perf_counter() - began))


def _single(engine: em.Engine, options: GenerateOptions, params: em.SamplingParams) -> list[em.Output]:
    try:
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
    except UnicodeDecodeError as e:
        raise PromptError(f"standard input cannot be read ({e}); give text in UTF-8") from e
    outputs = []
    render = renderer(engine.target.tokenizer, params.stop, options.color and has_color(sys.stdout))
    prompt = prompt_of(text, engine.target, options)
    for chunk in engine.stream(prompt, options.params_for(engine.target, prompt)):
        print(render(chunk), end="", flush=True)
        outputs += [chunk.output] if chunk.output is not None else []
    print()
    return outputs


def prompt_of(text: str, target: em.Target, options: GenerateOptions) -> EnginePrompt:
    """Return `text` as a conversation if the target has a chat template and --raw is off, else unchanged."""
    if not text:
        raise PromptError("the prompt is empty; give some text")
    if options.raw or target.tokenizer is None or not target.tokenizer.has_chat_template:
        if options.system:
            raise PromptError("--system needs a chat template; leave out --system or --raw")
        if options.image:
            raise PromptError(f"--image needs a chat template, and {target.name} has none")
        return text
    system: list[dict[str, object]] = [{"role": "system", "content": options.system}] if options.system else []
    shown = [{"type": "image", "image": str(path)} for path in options.image]
    parts: list[object] = [*shown, {"type": "text", "text": text}]
    question: dict[str, object] = {"role": "user", "content": parts if shown else text}
    return [*system, question]


def _many(
    engine: em.Engine, options: GenerateOptions, params: em.SamplingParams, questions: Sequence[Question]
) -> list[em.Output]:
    """Decode a file's rows together, and write one line of JSON per row, in order, once the rows before it are done."""
    for question in questions:
        question.check(engine.target, params.max_tokens)
    answers: list[list[em.Output]] = [[] for _ in questions]
    unfinished: dict[RequestState, int] = {}  # requests, with their rows

    def ask(row: int) -> None:
        tokens = questions[row].encode(engine.target, [output.text for output in answers[row]], params.max_tokens)
        request = engine.prepare(tokens, options.params_for(engine.target, tokens))
        engine.submit(request)
        unfinished[request] = row

    for row in range(len(questions)):
        ask(row)
    done = 0  # rows that are written
    is_quiet = options.quiet or (options.output is None and sys.stdout is not None and sys.stdout.isatty())
    bar = progress_bar(total=len(questions), desc="generate", unit="prompt", disable=is_quiet)
    with bar, _written(options.output) as write:
        while unfinished:
            engine.step()
            for request in [request for request in unfinished if request.finish_reason]:
                row = unfinished.pop(request)
                answers[row].append(engine.output(request))
                if len(answers[row]) <= len(questions[row].later):
                    ask(row)
            while done < len(questions) and len(answers[done]) > len(questions[done].later):
                turns, question = [_result(output) for output in answers[done]], questions[done]
                about = {} if question.category is None else {"category": question.category}
                line = {**about, "turns": turns} if about or question.later else turns[0]
                write(json.dumps(line, ensure_ascii=False))
                done += 1
                bar.update()
    return [output for outputs in answers for output in outputs]


@contextmanager
def _written(output: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line, or writes it to a file, which has another name until the block ends.

    Raises OutputError if it cannot be written; the lines so far are kept, as after Ctrl-C.
    """
    if output is None:
        yield partial(print, flush=True)
        return
    part = output.with_name(output.name + PART)
    kept = f"the answers so far are in {part}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            yield partial(print, file=file, flush=True)
            sync(file.fileno())
        part.replace(output)
    except KeyboardInterrupt as e:
        e.args = (kept,)
        raise
    except OSError as e:
        raise OutputError(f"{output} cannot be written ({e.strerror}); {kept}") from e


def _result(output: em.Output) -> dict[str, object]:
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.tokens),
        "acceptance_length": round(output.acceptance_length, 3),
    }


def summary(outputs: Sequence[em.Output], seconds: float) -> str:
    """Summarize tokens, speed and acceptance in one line."""
    tokens, rounds = sum(len(o.tokens) for o in outputs), sum(o.rounds for o in outputs)
    drafted, accepted = sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)
    text = f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s, prompts included"
    if not drafted:
        return f"{text}; nothing was drafted"
    text += "" if all(o.lossless for o in outputs) else "; lossy"
    return f"{text}; {tokens / max(1, rounds):.2f} tokens per forward (tau), {accepted} of {drafted} drafts accepted"
