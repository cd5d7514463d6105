"""`eagle-data regenerate`: replace answers by the target's own, in a file that can be continued."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle_mlx.errors import DataError
from eagle_mlx.files import check_idle
from eagle_mlx.progress import counted
from eagle_mlx.sampling_params import SamplingParams, limit_of
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, SHARE, setting
from eagle_mlx.text import LEAST_DISTINCT

from .jsonl import check_new, partial_path
from .options import DraftingOptions, ReadOptions, engine_of, tokenizer_of
from .sources.reading import ReadReport
from .synthesis.regeneration import RegenerateConfig, regenerate_to_file

HELP = """\
Replace every assistant answer by the target's own, which a draft head must predict.

Finished rows are in FILE.jsonl.partial until FILE.jsonl is complete, and the same command continues with it after an
interruption; --batch, --head and --num-speculative-tokens may change. To start over, delete the .partial file.

examples:
  eagle-data regenerate --target Qwen3-4B --data chats.jsonl --output answers.jsonl --temperature 0.7
  eagle-data regenerate --target Qwen3-4B --head out/head --data preset:ultrachat --limit 20000 --dedupe prompt \\
      --system 'You are a helpful assistant.' --system '' --output answers.jsonl
"""


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(ReadOptions):
    """What to answer, and how."""

    output: Path = setting(REQUIRED, "file to write", metavar="FILE.jsonl")
    temperature: float = setting(SamplingParams.temperature, "0 is greedy", limit_of("temperature"))
    top_k: int = setting(SamplingParams.top_k, "0 keeps all tokens", limit_of("top_k"))
    top_p: float = setting(SamplingParams.top_p, "1 keeps all tokens", limit_of("top_p"))
    max_tokens: int = setting(512, "maximum tokens of an answer", AT_LEAST_1)
    system: tuple[str, ...] = setting(
        (),
        "system prompt that replaces a conversation's own; '' for none; if repeated, the seed chooses one for each row",
        repeat=True,
    )
    least_distinct: float = setting(
        0.0, f"drop answers with a smaller share of distinct 4-grams; {LEAST_DISTINCT} drops loops", SHARE, metavar="R"
    )
    drafting: DraftingOptions = field(default_factory=DraftingOptions)


def run(options: RegenerateOptions) -> None:
    """Read the conversations first, so that bad data is reported at once, then answer them."""
    check_new(options.output, options.overwrite)
    check_idle(partial_path(options.output))
    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.choice.seed,
        max_tokens=options.max_tokens,
    )
    config = RegenerateConfig(params, options.system, options.least_distinct)
    settings = {**asdict(options.data_config()), "split": options.split}
    options.check()
    target = options.loading.load(options.target)
    report = ReadReport()
    found = options.conversations(tokenizer_of(target), report)
    asked = found if options.choice.filters.stream else list(found)
    if not asked:  # never of a stream
        raise DataError(f"nothing to answer in {', '.join(options.data)}; try --split all")
    if not options.choice.filters.stream and report.left_out:
        print(report)
    engine = engine_of(options.drafting, options.loading, target)
    count, done = regenerate_to_file(
        engine, asked, config, options.output, settings, options.overwrite, True, options.limit
    )
    if options.choice.filters.stream and report.left_out:
        print(report)
    print(
        f"{counted(count, 'conversation')} with {counted(done.answers, 'answer')} of "
        f"{counted(done.tokens, 'token')} to {options.output}; "
        f"{counted(done.cut, 'answer')} cut at {options.max_tokens} tokens, {done.looping:,} dropped as loops, "
        f"{counted(done.too_long, 'prompt')} too long for the context, {counted(done.dropped, 'conversation')} dropped"
    )
