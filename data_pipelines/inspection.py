"""`eagle-data inspect` and `eagle-data presets`: look at data before using it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.progress import counted
from eagle_mlx.shards import MANIFEST, ShardReader

from .commands import tokenizer_of
from .conversation import Conversation
from .options import InspectOptions, PresetsOptions
from .rendering import Rendered, RenderReport, examine
from .sources.reading import ReadReport, read_conversations
from .sources.spec import describe_presets


def list_presets(_: PresetsOptions) -> None:
    """Print the presets that `--data preset:NAME` reads."""
    print(describe_presets())


def inspect(options: InspectOptions) -> None:
    """Show the first conversations, then a histogram of lengths; or check a folder of shards."""
    if (Path(options.data[0]) / MANIFEST).is_file():
        if len(options.data) > 1:
            raise ConfigError("inspect checks one folder of shards at a time; run it again for each of the others")
        _inspect_shards(Path(options.data[0]))
        return
    tokenizer = tokenizer_of(options.loading.load(options.target)) if options.target else None
    report, template, lengths, learned = ReadReport(), RenderReport(), [], 0
    config = options.choice.config(options.data, max(options.limit, options.histogram))
    for index, conversation in enumerate(read_conversations(config, options.split, tokenizer, report)):
        length = len(conversation.text or "") + sum(len(message.content) for message in conversation.messages)
        if tokenizer is not None:
            try:
                rendered, lost = examine(tokenizer, conversation)
            except DataError:
                if not options.choice.filters.skip_bad:
                    raise
                continue
            template.add(lost)
            length, to_learn = len(rendered.tokens), sum(rendered.loss_mask)
            learned += to_learn
        if index < options.limit:
            print(f"--- {conversation.origin}")
            print(as_text(conversation) if tokenizer is None else marked(rendered, tokenizer.decode))
            if tokenizer is not None:
                print(f"--- {length} tokens, {to_learn} to learn, between ⟦ and ⟧")
        lengths.append(length)
    print(report)
    if options.histogram:
        print(histogram(lengths, "characters" if tokenizer is None else "tokens"))
    if tokenizer is not None and lengths:
        print(f"{learned:,} of {sum(lengths):,} tokens to learn ({learned / sum(lengths):.0%})")
    for note in template.notes(options.target or ""):
        print(note)


def _inspect_shards(folder: Path) -> None:
    reader = ShardReader(folder)
    reader.verify()
    for each in fields(reader.meta):
        print(f"{each.name:12} {getattr(reader.meta, each.name) or 'none'}")
    size = sum(f.size for f in reader.files)
    print(f"{counted(len(reader), 'conversation')}, {counted(reader.tokens, 'token')}, {reader.loss_tokens:,} to learn")
    print(f"{counted(len(reader.files), 'shard')}, {size / 1e6:,.1f} MB; every SHA-256 is correct")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR = 40  # characters


def marked(rendered: Rendered, decode: Callable[[list[int]], str]) -> str:
    """Return the text with the learned parts between ⟦ and ⟧."""
    parts = []
    for learned, pairs in groupby(zip(*rendered, strict=True), itemgetter(1)):
        text = escape_control_characters(decode([token for token, _ in pairs]))
        parts.append(f"⟦{text}⟧" if learned else text)
    return "".join(parts)


def as_text(conversation: Conversation) -> str:
    """Return a conversation as plain text, without a chat template."""
    if conversation.text is not None:
        return escape_control_characters(conversation.text)
    lines = [f"[tools] {json.dumps(list(conversation.tools), ensure_ascii=False)}"] if conversation.tools else []
    for message in conversation.messages:
        lines.append(f"[{message.role}] {message.content}")
        lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in message.extra.items()]
    return escape_control_characters("\n".join(lines))


def escape_control_characters(text: str) -> str:
    """Return the text with control characters escaped, so that data cannot send commands to a terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def histogram(lengths: Sequence[int], unit: str) -> str:
    """Return a histogram of lengths in bins that double, with a line of statistics."""
    if not lengths:
        return f"no conversations, so there are no lengths in {unit}"
    ordered = sorted(lengths)
    bins = Counter(max(16, 1 << (length - 1).bit_length()) for length in ordered)
    edges = [edge for power in range(max(bins).bit_length()) if (edge := 1 << power) >= min(bins)]
    width, most = len(f"{edges[-1]:,}"), max(bins.values())
    lines = [
        f"  up to {edge:>{width},}  {'█' * round(_BAR * bins[edge] / most):{_BAR}}  {bins[edge]:,}" for edge in edges
    ]
    at = [ordered[len(ordered) * share // 100] for share in (50, 90, 99)]
    figures = (
        f"shortest {ordered[0]:,}, median {at[0]:,}, mean {sum(ordered) / len(ordered):,.0f}, "
        f"90 % below {at[1]:,}, 99 % below {at[2]:,}, longest {ordered[-1]:,}"
    )
    return "\n".join([f"{counted(len(ordered), 'conversation')}, lengths in {unit}:", *lines, figures])
