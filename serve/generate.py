"""The command `eagle-generate`: one prompt, or a file of them, through the engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from eagle_mlx.cpu import blas
from eagle_mlx.engine import Engine
from eagle_mlx.errors import EagleError, OutputError, PromptError
from eagle_mlx.files import write_output
from eagle_mlx.request import Output
from eagle_mlx.request import Prompt as EnginePrompt
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.target_options import add_target_arguments, options_of

from .head_choice import load_proposer
from .memory import add_kv_gb, add_prefill_chunk, bytes_of, prefill_chunk_of
from .prompts import Question, read_questions
from .speculation import add_arguments, from_arguments

EPILOG = """\
examples:
  eagle-generate 'def median(values):'                        the embedded target and head
  eagle-generate --target Qwen3-4B-4bit 'Why is the sky blue?'            with the head that is found for it
  eagle-generate --target Qwen3-4B-4bit --head user/head 'Why is the sky blue?'
  git diff | eagle-generate --target Qwen3-4B-4bit --spec-decode ngram --system 'Review this change.' -
  eagle-generate --file prompts.jsonl --output answers.jsonl --batch 8

The text goes to standard output, everything else to standard error. With the same seed the text is the same whatever
drafts, how deep, and in which company; without one, sampled text follows the model's own distribution."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-generate; returns the exit status: 0, 2 for an error, 130 when interrupted."""
    args = _parser().parse_args(argv)
    say(f"blas: {blas.activate()}", args)
    try:
        _generate(args)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the text has seen enough
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  (what is left goes nowhere)
    return 0


def say(text: str, args: argparse.Namespace) -> None:
    """A line about the run, unless it is to be quiet."""
    if not args.quiet:
        print(text, file=sys.stderr)


def _generate(args: argparse.Namespace) -> None:
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=tuple(args.stop),
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    if (args.prompt is None) == (args.file is None):
        raise PromptError("give one prompt, `-` to read it from standard input, or a --file of prompts")
    if args.file is None and args.output is not None:
        raise OutputError("--output goes with --file; the text of one prompt goes to standard output")
    if args.output is not None and args.output.exists():
        raise OutputError(f"{args.output} exists already; name another file")
    chunk, kv_bytes = prefill_chunk_of(args), bytes_of("--kv-gb", args.kv_gb)
    name, speculation = from_arguments(args)
    options = options_of(args)
    target = options.load(name)
    speculation, proposer = load_proposer(speculation, target, name, lambda text: say(text, args))
    options.wire_active()
    policy = speculation.make_policy()
    engine = Engine(
        target,
        proposer,
        policy=policy,
        max_batch=args.batch,
        prefill_chunk=chunk,
        kv_bits=args.kv_bits,
        kv_bytes=kv_bytes,
    )
    prior = speculation.prior(engine)
    notes = [*speculation.about_head(engine), *speculation.why_chains(engine)]
    say("\n".join([f"target: {target.name}", f"speculation: {speculation}", *notes]), args)
    began = perf_counter()
    try:
        outputs = _one(engine, args, params) if args.file is None else _many(engine, args, params)
    finally:
        if prior is not None:
            prior.save()
    say(summary(outputs, perf_counter() - began), args)


def _one(engine: Engine, args: argparse.Namespace, params: SamplingParams) -> list[Output]:
    """Stream the text of one prompt."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    outputs = []
    for chunk in engine.stream(prompt_of(text, engine.target, args), params):
        print(chunk.text, end="", flush=True)
        outputs += [chunk.output] if chunk.output is not None else []
    print()
    return outputs


def prompt_of(text: str, target: Target, args: argparse.Namespace) -> EnginePrompt:
    """Text as a turn of a conversation where the target has a chat template, unless it is to be taken as it is."""
    if not text:
        raise PromptError("the prompt is empty; give some text")
    if args.raw or target.tokenizer is None or not target.tokenizer.has_chat_template:
        if args.system:
            raise PromptError("--system needs a chat template; leave it out, or --raw")
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def _many(engine: Engine, args: argparse.Namespace, params: SamplingParams) -> list[Output]:
    """Decode a file's rows side by side, turn by turn; one line of JSON for each, in their order."""
    questions = read_questions(args.file)
    for question in questions:
        question.check(engine.target, params.max_tokens)
    answers: list[list[Output]] = [[] for _ in questions]
    for turn in range(1 + max(len(question.later) for question in questions)):
        asked = [index for index, question in enumerate(questions) if turn <= len(question.later)]
        prompts = [
            questions[index].encode(engine.target, [output.text for output in answers[index]], params.max_tokens)
            for index in asked
        ]
        outputs = engine.generate(prompts, params, progress=not args.quiet)
        for index, output in zip(asked, outputs, strict=True):
            answers[index].append(output)
    rows = [_row(question, each) for question, each in zip(questions, answers, strict=True)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if args.output is None:
        print(lines, end="")
    else:
        write_output(args.output, lines)
    return [output for each in answers for output in each]


def _row(question: Question, answers: Sequence[Output]) -> dict[str, object]:
    """What a row came to; of a row of `turns` under that name, an answer for each."""
    if question.category is None:
        return _result(answers[0])
    return {"category": question.category, "turns": [_result(answer) for answer in answers]}


def _result(output: Output) -> dict[str, object]:
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.tokens),
        "acceptance_length": round(output.acceptance_length, 3),
    }


def summary(outputs: Sequence[Output], seconds: float) -> str:
    """Tokens, speed and what came of drafting, in one line."""
    tokens, rounds = sum(len(o.tokens) for o in outputs), sum(o.rounds for o in outputs)
    drafted, accepted = sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)
    text = f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s, prompts included"
    if not drafted:
        return f"{text}; nothing was drafted"
    return f"{text}; {tokens / max(1, rounds):.2f} tokens per forward (tau), {accepted} of {drafted} drafts accepted"


def _parser() -> argparse.ArgumentParser:
    default = SamplingParams()
    parser = argparse.ArgumentParser(
        prog="eagle-generate",
        description="Generate text with speculative decoding: the model's own text, sooner.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", help="what to say to the model; `-` reads standard input")
    parser.add_argument("--file", type=Path, metavar="FILE.jsonl", help="rows of `messages`, `prompt` or `turns`")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="answers to --file (default: to the screen)")
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="prompts of a file that decode together (default 8)"
    )
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="keep keys and values in so few bits: less memory")
    add_prefill_chunk(parser)
    add_kv_gb(parser)
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    parser.add_argument("--quiet", action="store_true", help="the text alone")
    add_arguments(parser)
    add_target_arguments(parser)
    draw = parser.add_argument_group("sampling")
    draw.add_argument("--max-tokens", type=int, default=default.max_tokens, help=f"default {default.max_tokens}")
    draw.add_argument("--temperature", type=float, default=default.temperature, help="default 0, greedy")
    draw.add_argument("--top-k", type=int, default=default.top_k, help="default 0, all tokens")
    draw.add_argument("--top-p", type=float, default=default.top_p, help="default 1, all tokens")
    draw.add_argument("--min-p", type=float, default=default.min_p, help="default 0, all tokens")
    for name, off in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
        draw.add_argument(f"--{name}-penalty", type=float, default=off, metavar="X", help=f"default {off:g}, none")
    draw.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    draw.add_argument("--seed", type=int, help="makes sampled text repeatable")
    draw.add_argument("--ignore-eos", action="store_true", help="continue after the model's end of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
