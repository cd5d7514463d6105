"""`eagle-data inspect` and `eagle-data presets`: look at data before using it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.progress import counted
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, Group, setting
from eagle_mlx.shards import MANIFEST, ShardReader
from eagle_mlx.target_options import TargetOptions

from .conversation import Conversation
from .options import SPLIT_HELP, ChoiceOptions, tokenizer_of
from .rendering import Rendered, TemplateReport, all_tokens, render, unrendered
from .sources import presets
from .sources.reading import ReadReport, Split, read_conversations

HELP = (
    "Look at conversations and their lengths, or check a folder of shards. With --target, the learned parts are green "
    "on a terminal (unless NO_COLOR is set), and between ⟦ and ⟧ elsewhere."
)


@dataclass(frozen=True, kw_only=True)
class InspectChoice(ChoiceOptions):
    """Which conversations to show, and in which order."""

    split: Split | None = setting("all", SPLIT_HELP)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Group):
    """What to inspect."""

    data: tuple[str, ...] = setting(
        REQUIRED, "a folder of shards, or sources as for --data", name="SOURCE", positional=True
    )
    target: str | None = setting(
        None, "render conversations for this model, and mark the learned parts", metavar="MODEL"
    )
    limit: int = setting(3, "conversations to show", AT_LEAST_1)
    histogram: int = setting(1000, "conversations in the histogram of lengths; 0 for no histogram")
    choice: InspectChoice = field(default_factory=InspectChoice)
    loading: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True)
class PresetsOptions(Group):
    """No settings."""


def list_presets(_: PresetsOptions) -> None:
    """Print the presets that `--data preset:NAME` reads."""
    print(presets.describe())


def inspect(options: InspectOptions) -> None:
    """Show the first conversations, then a histogram of lengths; or check a folder of shards."""
    if (Path(options.data[0]) / MANIFEST).is_file():
        if len(options.data) > 1:
            raise ConfigError("inspect checks one folder of shards at a time; run it again for each of the others")
        _inspect_shards(Path(options.data[0]))
        return
    tokenizer = tokenizer_of(options.loading.load(options.target)) if options.target else None
    report, lengths, learned = ReadReport(), [], 0
    template = TemplateReport()
    config = options.choice.config(options.data, max(options.limit, options.histogram))
    for index, conversation in enumerate(read_conversations(config, options.choice.split, tokenizer, report)):
        try:
            rendered = _rendered(tokenizer, conversation)
            if tokenizer is not None:
                template.add(unrendered(tokenizer, conversation))
        except DataError:
            if not options.choice.skip_bad:
                raise
            continue
        if index < options.limit:
            _show(conversation, rendered, tokenizer)
        lengths.append(_length(conversation, rendered))
        learned += sum(rendered.loss_mask) if rendered is not None else 0
    print(report)
    if options.histogram:
        print(histogram(lengths, "characters" if tokenizer is None else "tokens"))
    if tokenizer is not None and lengths:
        print(f"{learned:,} of {sum(lengths):,} tokens to learn ({learned / sum(lengths):.0%})")
    for note in template.notes(options.target or ""):
        print(note)


def _rendered(tokenizer: TokenizerWrapper | None, conversation: Conversation) -> Rendered | None:
    """Render a conversation if there is a tokenizer. Without an answer, the loss mask is 0 everywhere."""
    if tokenizer is None:
        return None
    if conversation.text is None and not any(m.role == "assistant" for m in conversation.messages):
        tokens = all_tokens(tokenizer, conversation)
        return Rendered(tokens, [0] * len(tokens))
    return render(tokenizer, conversation)


def _show(conversation: Conversation, rendered: Rendered | None, tokenizer: TokenizerWrapper | None) -> None:
    color = wants_color(sys.stdout)
    print(heading(conversation.origin, color))
    if rendered is None or tokenizer is None:
        print(as_text(conversation))
        return
    print(marked(rendered, tokenizer.decode, color))
    where = "in green" if color else "between ⟦ and ⟧"
    print(heading(f"{len(rendered.tokens)} tokens, {sum(rendered.loss_mask)} to learn, {where}", color))


def _length(conversation: Conversation, rendered: Rendered | None) -> int:
    if rendered is not None:
        return len(rendered.tokens)
    return len(conversation.text or "") + sum(len(message.content) for message in conversation.messages)


def _inspect_shards(folder: Path) -> None:
    reader = ShardReader(folder)
    reader.verify()
    for each in fields(reader.meta):
        print(f"{each.name:12} {getattr(reader.meta, each.name) or 'none'}")
    size = sum(f.size for f in reader.files)
    print(f"{counted(len(reader), 'conversation')}, {counted(reader.tokens, 'token')}, {reader.loss_tokens:,} to learn")
    print(f"{counted(len(reader.files), 'shard')}, {size / 1e6:,.1f} MB; every SHA-256 is correct")


_LEARNED, _OTHER, _HEAD, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR = 40
"""Width of the longest bar in characters."""


def wants_color(stream: IO[str]) -> bool:
    """Whether to use color: the stream is a capable terminal, and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def marked(rendered: Rendered, decode: Callable[[list[int]], str], color: bool) -> str:
    """Return the text with the learned parts in green and the rest faint, or between ⟦ and ⟧ without color."""
    parts, start = [], 0
    tokens, mask = rendered
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or mask[i] != mask[start]:
            text = escape_control_characters(decode(tokens[start:i]))
            if color:
                parts.append(f"{_LEARNED if mask[start] else _OTHER}{text}{_RESET}")
            else:
                parts.append(f"⟦{text}⟧" if mask[start] else text)
            start = i
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


def heading(text: str, color: bool) -> str:
    return f"{_HEAD}--- {text}{_RESET}" if color else f"--- {text}"


def escape_control_characters(text: str) -> str:
    """Return the text with control characters escaped, so that data cannot send commands to a terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def histogram(lengths: Sequence[int], unit: str) -> str:
    """Return a histogram of lengths in bins that double, with a line of statistics."""
    if not lengths:
        return f"no conversations, so there are no lengths in {unit}"
    ordered = sorted(lengths)
    bins = Counter(max(16, 1 << (length - 1).bit_length()) if length else 16 for length in ordered)
    edges = [16 << i for i in range((max(bins) // 16).bit_length()) if 16 << i >= min(bins)]
    most = max(bins.values())
    width = max(len(f"{edge:,}") for edge in edges)
    lines = [
        f"  up to {edge:>{width},}  {'█' * round(_BAR * bins[edge] / most):{_BAR}}  {bins[edge]:,}" for edge in edges
    ]
    at = [ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)]
    figures = (
        f"shortest {ordered[0]:,}, median {at[0]:,}, mean {sum(ordered) / len(ordered):,.0f}, "
        f"90 % below {at[1]:,}, 99 % below {at[2]:,}, longest {ordered[-1]:,}"
    )
    return "\n".join([f"{counted(len(ordered), 'conversation')}, lengths in {unit}:", *lines, figures])
