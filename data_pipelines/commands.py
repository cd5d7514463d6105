"""The commands of `eagle-data`, after their settings are read."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.cpu import tune_process
from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, DataError, OutputError, PromptError, TargetError
from eagle_mlx.files import check_apart, check_free, check_idle, free_disk
from eagle_mlx.head_check import head_warning, load_head
from eagle_mlx.heads.eagle3 import default_aux_layers
from eagle_mlx.progress import counted
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.shards import MANIFEST, ShardReader, bytes_per_token, unfinished_folder
from eagle_mlx.target import Target
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.vision.spans import MARK

from .capturing import ShardCapture
from .conversation import Conversation
from .jsonl import check_new, partial_path
from .options import CollectOptions, DraftingOptions, InspectOptions, MakeOptions, RegenerateOptions
from .rendering import RenderReport, Sample, examine, render_all
from .sources.reading import ReadReport, check_conversations, read_conversations
from .synthesis import steerable
from .synthesis.file import MakeLimits, Wanted, make_to_file
from .synthesis.loop import growing_engine
from .synthesis.regeneration import RegenerateConfig, regenerate_to_file

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR = 40  # characters


def make(options: MakeOptions) -> None:
    """Check the template first, so that an unusable target is reported at once, then make conversations."""
    check_new(options.output, options.overwrite)
    begun, limits = partial_path(options.output), MakeLimits()
    check_idle(begun)
    if options.finish:
        if not begun.exists():
            raise DataError(f"there is no {begun} to finish; leave out --finish to make conversations")
        limits = MakeLimits(enough=lambda made, coming: True, first=False)
    wanted = Wanted(options.rows or 0, options.tokens or 0)
    config = options.config()
    tune_process()
    target = options.loading.load(options.target)
    usable = {domain.name for domain in steerable(tokenizer_of(target), config.domains, target.name)}
    if left := ", ".join(domain.name for domain in config.domains if domain.name not in usable):
        print(f"the chat template accepts no system prompt, so these domains are left out: {left}", file=sys.stderr)
    engine = engine_of(options.drafting, options.loading, target)
    report = make_to_file(engine, config, wanted, options.output, options.overwrite, True, limits=limits)
    print(f"{options.output}: {report.summary()}")


def regenerate(options: RegenerateOptions) -> None:
    """Read the conversations first, so that bad data is reported at once, then answer them."""
    check_new(options.output, options.overwrite)
    check_idle(partial_path(options.output))
    sampling = {name: options.value(name) for name in ("temperature", "top_k", "top_p", "max_tokens")}
    params = SamplingParams(seed=options.choice.seed, **sampling)
    config = RegenerateConfig(params, options.system, options.least_distinct)
    data, stream = options.choice.config(options.data, options.limit), options.choice.filters.stream
    settings = {**asdict(data), "split": options.split}
    check_apart(options.output, *(source.name for source in data.parsed))
    check_conversations(data, options.split)
    target = options.loading.load(options.target)
    report = ReadReport()
    conversations = read_conversations(data, options.split, tokenizer_of(target), report)
    questions = conversations if stream else list(conversations)
    if not questions:  # never of a stream
        raise DataError(f"nothing to answer in {', '.join(options.data)}; try --split all")
    if report.left_out:
        print(report)
    engine = engine_of(options.drafting, options.loading, target)
    count, done = regenerate_to_file(
        engine, questions, config, options.output, settings, options.overwrite, True, options.limit
    )
    if stream and report.left_out:
        print(report)
    print(
        f"{counted(count, 'conversation')} with {counted(done.answers, 'answer')} of "
        f"{counted(done.tokens, 'token')} to {options.output}; "
        f"{counted(done.cut, 'answer')} cut at {options.max_tokens} tokens, {done.looping:,} dropped as loops, "
        f"{counted(done.too_long, 'prompt')} too long for the context, {counted(done.dropped, 'conversation')} dropped"
    )


def collect(options: CollectOptions) -> None:
    """Check all data first, so that errors show at once, then capture the missing shards."""
    if not options.resume:
        check_free(options.output, options.overwrite)
    check_idle(options.output, unfinished_folder(options.output))  # before the target is loaded
    config = options.choice.config(options.data, options.limit)
    check_apart(options.output, options.target, *(source.name for source in config.parsed))
    check_conversations(config, options.split, answers=True, with_images=True)
    tune_process()
    target = options.loading.load(options.target)
    options.loading.wire_active()
    aux_layers = aux_layers_of(options.aux_layers, target)
    most = min(options.max_length, target.context_length)
    tokenizer, read = tokenizer_of(target), ReadReport()
    conversations = read_conversations(config, options.split, tokenizer, read)
    skip_bad = options.choice.filters.skip_bad
    samples, report = render_all(tokenizer, conversations, most, skip_bad, target.vision)
    if read.left_out or report.unusable:
        print(_counts(read, report))
    print(
        f"{counted(report.conversations, 'conversation')}, {counted(report.tokens, 'token')}, "
        f"{report.loss_tokens:,} to learn; "
        f"{report.cut:,} cut at {most} tokens, {report.dropped:,} dropped because no answer was left"
    )
    for note in report.notes(target.name):
        print(note)
    if not samples:
        raise DataError(f"nothing to capture from {', '.join(options.data)}; try --split all or a larger --max-length")
    plan = ShardCapture(target, aux_layers, samples, options.bits, options.batch_tokens)
    with plan.open(options.output, options.overwrite, options.resume) as shards:
        missing = plan.missing(shards)
        if shards.files:
            print(f"{len(shards.files):,} of {len(plan):,} shards are complete and are kept")
        need = plan.tokens(missing) * bytes_per_token(plan.meta)
        if need > (free := free_disk(options.output)):
            raise OutputError(
                f"{options.output} needs {need / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; use --bits 8 "
                "or a smaller --limit, or train online, which stores no hidden states"
            )
        print(
            f"layers {aux_layers} and the last of {target.num_layers} in {options.bits} bits; "
            f"{plan.tokens(missing):,} tokens, {need / 1e6:,.1f} MB to {options.output}"
        )
        if (before := target.num_layers - 2) not in aux_layers:
            print(f"heads of two layers, such as P-EAGLE, need layer {before} too: name it with --aux-layers")
        try:
            plan.run(shards, progress=True)
        except KeyboardInterrupt as e:
            if shards.files:
                kept = f"{len(shards.files):,} of {len(plan):,} shards are kept"
                e.args = (f"{kept}, and the same command continues from there",)
            raise


def _counts(read: ReadReport, rendered: RenderReport) -> str:
    return str(read) + (f"; {rendered.unusable:,} more refused by the chat template" if rendered.unusable else "")


def engine_of(options: DraftingOptions, loading: TargetOptions, target: Target) -> Engine:
    """Return an engine that drafts with the given head, if any. Raises HeadError if it does not fit the target."""
    head = None
    if options.head is not None and options.num_speculative_tokens:
        head = load_head(options.head, target, check=False)
        if (warning := head_warning(head, target)) is not None:
            print(f"warning: {warning}", file=sys.stderr)
    loading.wire_active()
    return growing_engine(target, head, options.num_speculative_tokens, options.batch)


def aux_layers_of(given: str | None, target: Target) -> tuple[int, ...]:
    """Return the layers of `--aux-layers`, or EAGLE-3's default layers. Raises ConfigError if a layer is invalid."""
    if given is None:
        return default_aux_layers(target.num_layers)
    layers = tuple(map(int, given.split(",")))
    if max(layers) >= target.num_layers:
        raise ConfigError(f"--aux-layers {given}: the target has layers 0 to {target.num_layers - 1}")
    return layers


def tokenizer_of(target: Target) -> TokenizerWrapper:
    if target.tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer")
    return target.tokenizer


def inspect(options: InspectOptions) -> None:
    """Show the first conversations, then a histogram of lengths; or check a folder of shards."""
    if (Path(options.data[0]) / MANIFEST).is_file():
        if len(options.data) > 1:
            raise ConfigError("inspect checks one folder of shards at a time; run it again for each of the others")
        _inspect_shards(Path(options.data[0]))
        return
    target = options.loading.load(options.target) if options.target else None
    tokenizer, vision = (tokenizer_of(target), target.vision) if target is not None else (None, None)
    report, template, lengths, learned = ReadReport(), RenderReport(), list[int](), 0
    config = options.choice.config(options.data, max(options.limit, options.histogram))
    for conversation in read_conversations(config, options.split, tokenizer, report):
        length = len(conversation.text or "") + sum(len(message.content) for message in conversation.messages)
        if tokenizer is not None:
            try:
                rendered, lost = examine(tokenizer, conversation, vision)
            except (DataError, PromptError):
                if not options.choice.filters.skip_bad:
                    raise
                template.unusable += 1
                continue
            template.add(lost)
            length, to_learn = len(rendered.tokens), sum(rendered.loss_mask)
            learned += to_learn
        if len(lengths) < options.limit:
            print(f"--- {conversation.origin}")
            print(as_text(conversation) if tokenizer is None else marked(rendered, tokenizer.decode))
            if tokenizer is not None:
                print(f"--- {length} tokens, {to_learn} to learn, between ⟦ and ⟧")
        lengths.append(length)
    print(_counts(report, template))
    if options.histogram:
        print(histogram(lengths, "characters" if tokenizer is None else "tokens"))
    if tokenizer is not None and lengths:
        print(f"{learned:,} of {sum(lengths):,} tokens to learn ({learned / sum(lengths):.0%})")
    for note in template.notes(options.target or ""):
        print(note)


def _inspect_shards(folder: Path) -> None:
    reader = ShardReader(folder)
    reader.verify()
    for name, value in vars(reader.meta).items():
        print(f"{name:12} {value or 'none'}")
    size = sum(f.size for f in reader.files)
    print(f"{counted(len(reader), 'conversation')}, {counted(reader.tokens, 'token')}, {reader.loss_tokens:,} to learn")
    print(f"{counted(len(reader.files), 'shard')}, {size / 1e6:,.1f} MB; every SHA-256 is correct")


def marked(rendered: Sample, decode: Callable[[list[int]], str]) -> str:
    parts, pairs_of = [], list(zip(rendered.tokens, rendered.loss_mask, strict=True))
    for span in reversed(rendered.images):
        del pairs_of[span.start + 1 : span.end]  # shows one placeholder
    for learned, pairs in groupby(pairs_of, itemgetter(1)):
        text = escape_control_characters(decode([token for token, _ in pairs]))
        parts.append(f"⟦{text}⟧" if learned else text)
    return "".join(parts)


def as_text(conversation: Conversation) -> str:
    lines = [conversation.text] if conversation.text is not None else []
    if conversation.tools:
        lines.append(f"[tools] {json.dumps(list(conversation.tools), ensure_ascii=False)}")
    for message in conversation.messages:
        lines.append(f"[{message.role}] {MARK.sub('[image]', message.content)}")
        lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in message.extra.items()]
    return escape_control_characters("\n".join(lines))


def escape_control_characters(text: str) -> str:
    """Return the text with control characters escaped, so that data cannot send commands to a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def histogram(lengths: Sequence[int], unit: str) -> str:
    """Return a histogram of lengths in bins that double, with a line of statistics."""
    if not lengths:
        return f"no conversations, so there are no lengths in {unit}"
    ordered = sorted(lengths)
    bins = Counter(max(16, 1 << (length - 1).bit_length()) for length in ordered)
    edges = [1 << power for power in range(min(bins).bit_length() - 1, max(bins).bit_length())]
    width, most = len(f"{edges[-1]:,}"), max(bins.values())
    lines = [
        f"  up to {edge:>{width},}  {'█' * round(_BAR * bins[edge] / most):{_BAR}}  {bins[edge]:,}" for edge in edges
    ]
    median, high, higher = (ordered[len(ordered) * share // 100] for share in (50, 90, 99))
    figures = (
        f"shortest {ordered[0]:,}, median {median:,}, mean {sum(ordered) / len(ordered):,.0f}, "
        f"90 % below {high:,}, 99 % below {higher:,}, longest {ordered[-1]:,}"
    )
    return "\n".join([f"{counted(len(ordered), 'conversation')}, lengths in {unit}:", *lines, figures])
