"""`eagle-data regenerate`: answers of the target's own, into a file that can be continued."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from eagle_mlx.errors import DataError
from eagle_mlx.progress import counted
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target_options import options_of
from eagle_mlx.text import LEAST_DISTINCT

from .jsonl import check_idle, check_new, partial_path
from .options import add_data, add_drafting, conversations, data_config, engine_of, tokenizer_of
from .sources.reading import ReadReport
from .synthesis.regeneration import RegenerateConfig, regenerate_to_file

HELP = """\
Replace every assistant answer by the target's own, which is what a draft head has to predict.

What is done lies in FILE.jsonl.partial until FILE.jsonl is whole. Ctrl-C, a SIGTERM or a crash lose no row that was
made (a power cut those of its last seconds): the same command continues with that file by itself, and the result is the
same to the byte as if nothing had happened. --batch, --head and --num-speculative-tokens may differ; anything else
that changes the answers is refused. To begin anew, delete the .partial file.

examples:
  eagle-data regenerate --target Qwen3-4B --data chats.jsonl --output answers.jsonl --temperature 0.7
  eagle-data regenerate --target Qwen3-4B --head out/head --data preset:ultrachat --limit 20000 --dedupe prompt \\
      --system 'You are a helpful assistant.' --system '' --output answers.jsonl
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command with its flags."""
    part = commands.add_parser("regenerate", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    part.set_defaults(command=run)
    add_data(part, None)
    part.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file to make")
    defaults = SamplingParams()
    part.add_argument("--temperature", type=float, default=defaults.temperature, help="%(default)s; 0 is greedy")
    part.add_argument("--top-k", type=int, default=defaults.top_k, help="%(default)s; 0 keeps all")
    part.add_argument("--top-p", type=float, default=defaults.top_p, help="%(default)s; 1 keeps all")
    part.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of one answer (%(default)s)")
    add_drafting(part)
    part.add_argument(
        "--system",
        action="append",
        default=[],
        metavar="TEXT",
        help="system prompt in place of a conversation's own, '' for none; of several each row gets one by the seed",
    )
    part.add_argument(
        "--least-distinct",
        type=float,
        default=0.0,
        metavar="R",
        help=f"leave out answers with a smaller share of distinct 4-grams; {LEAST_DISTINCT} drops loops (%(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Read the conversations first, so that bad data shows at once, then answer them."""
    check_new(args.output, args.overwrite)
    check_idle(args.output)
    params = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens
    )
    config = RegenerateConfig(params, tuple(args.system), args.least_distinct)
    settings = {**asdict(data_config(args, args.limit)), "split": args.split}
    target = options_of(args).load(args.target)
    report = ReadReport()
    found = conversations(args, tokenizer_of(target), report)
    asked = found if args.stream else list(found)
    if not args.stream:
        if report.left_out:
            print(report)
        if not asked:
            raise DataError(f"nothing to answer in {', '.join(args.data)}; try --split all")
    engine = engine_of(args, target)
    try:
        count, done = regenerate_to_file(engine, asked, config, args.output, settings, args.overwrite, True, args.limit)
    except KeyboardInterrupt as e:
        part = partial_path(args.output)
        if not part.exists():
            raise
        raise type(e)(f"what is done is in {part}, and the same command continues with it") from None
    if args.stream and report.left_out:
        print(report)
    print(
        f"{counted(count, 'conversation')} with {counted(done.answers, 'answer')} of "
        f"{counted(done.tokens, 'token')} to {args.output}; "
        f"{counted(done.cut, 'answer')} cut at {args.max_tokens} tokens, {done.looping:,} left out as loops, "
        f"{counted(done.too_long, 'prompt')} too long for the context, {counted(done.dropped, 'conversation')} dropped"
    )
