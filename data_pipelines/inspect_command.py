"""`eagle-data inspect` and `eagle-data presets`: looking at data before anything is done with it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.progress import counted
from eagle_mlx.shards import MANIFEST, ShardReader
from eagle_mlx.target_options import options_of

from . import presets
from .chat import Rendered, TemplateReport, all_tokens, render, unrendered
from .conversation import Conversation
from .filters import ReadReport
from .options import add_choice, add_target, data_config, positive, tokenizer_of
from .preview import as_text, heading, histogram, marked, wants_colour
from .sources import read_conversations


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands with their flags."""
    part = commands.add_parser(
        "inspect",
        description="Look at conversations and their lengths, or check a folder of shards. With --target what is "
        "learnt is green on a terminal (NO_COLOR turns that off), and stands between ⟦ and ⟧ elsewhere.",
    )
    part.set_defaults(command=inspect)
    part.add_argument("data", nargs="+", metavar="SOURCE", help="a folder of shards, or what --data takes")
    add_target(part, "show what is rendered for this model, and what of it is learnt")
    part.add_argument("--limit", type=positive, default=3, metavar="N", help="conversations to show (%(default)s)")
    part.add_argument(
        "--histogram",
        type=int,
        default=1000,
        metavar="N",
        help="conversations whose lengths are counted, shown ones included; 0 for none (%(default)s)",
    )
    add_choice(part, "all")
    part = commands.add_parser("presets", description="List the sets that --data preset:NAME reads.")
    part.set_defaults(command=lambda args: print(presets.describe()))


def inspect(args: argparse.Namespace) -> None:
    """Show the first conversations, then the lengths of more."""
    if (Path(args.data[0]) / MANIFEST).is_file():
        if len(args.data) > 1:
            raise ConfigError("inspect checks one folder of shards at a time; name the others in commands of their own")
        _inspect_shards(Path(args.data[0]))
        return
    tokenizer = tokenizer_of(options_of(args).load(args.target)) if args.target else None
    report, lengths, learnt = ReadReport(), [], 0
    template = TemplateReport()
    config = data_config(args, max(args.limit, args.histogram))
    for index, conversation in enumerate(read_conversations(config, args.split, tokenizer, report)):
        try:
            rendered = _rendered(tokenizer, conversation)
            if tokenizer is not None:
                template.add(unrendered(tokenizer, conversation))
        except DataError:
            if not args.skip_bad:
                raise
            continue
        if index < args.limit:
            _show(conversation, rendered, tokenizer)
        lengths.append(_length(conversation, rendered))
        learnt += sum(rendered.loss_mask) if rendered is not None else 0
    print(report)
    if args.histogram:
        print(histogram(lengths, "characters" if tokenizer is None else "tokens"))
    if tokenizer is not None and lengths:
        print(f"{learnt:,} of {sum(lengths):,} tokens to learn ({learnt / sum(lengths):.0%})")
    for note in template.notes(args.target):
        print(note)


def _rendered(tokenizer: TokenizerWrapper | None, conversation: Conversation) -> Rendered | None:
    """What is made of a conversation for a model; of one without an answer nothing is learnt."""
    if tokenizer is None:
        return None
    if conversation.text is None and not any(m.role == "assistant" for m in conversation.messages):
        tokens = all_tokens(tokenizer, conversation)
        return Rendered(tokens, [0] * len(tokens))
    return render(tokenizer, conversation)


def _show(conversation: Conversation, rendered: Rendered | None, tokenizer: TokenizerWrapper | None) -> None:
    colour = wants_colour(sys.stdout)
    print(heading(conversation.origin, colour))
    if rendered is None or tokenizer is None:
        print(as_text(conversation))
        return
    print(marked(rendered, tokenizer.decode, colour))
    where = "in green" if colour else "between ⟦ and ⟧"
    print(heading(f"{len(rendered.tokens)} tokens, {sum(rendered.loss_mask)} to learn, {where}", colour))


def _length(conversation: Conversation, rendered: Rendered | None) -> int:
    if rendered is not None:
        return len(rendered.tokens)
    return len(conversation.text or "") + sum(len(message.content) for message in conversation.messages)


def _inspect_shards(folder: Path) -> None:
    reader = ShardReader(folder)
    reader.verify()
    for field in fields(reader.meta):
        print(f"{field.name:12} {getattr(reader.meta, field.name) or 'none'}")
    size = sum(f.size for f in reader.files)
    print(f"{counted(len(reader), 'conversation')}, {counted(reader.tokens, 'token')}, {reader.loss_tokens:,} to learn")
    print(f"{counted(len(reader.files), 'shard')}, {size / 1e6:,.1f} MB; every SHA-256 is right")
