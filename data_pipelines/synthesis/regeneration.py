"""`eagle-data regenerate`: replace answers by the target's own, in a file that can be continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.files import check_idle
from eagle_mlx.progress import counted, progress_bar
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams, limit_of
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, SHARE, setting
from eagle_mlx.text import LEAST_DISTINCT, is_loop

from ..conversation import Conversation, Message
from ..jsonl import as_line, check_new, open_partial, partial_path
from ..options import DraftingOptions, ReadOptions, engine_of, tokenizer_of
from ..rendering import prompt_tokens
from ..sources.reading import ReadReport, check_conversations, read_conversations
from .loop import Task, run_tasks, seed_of, text_settings
from .report import Counts

HELP = """\
Replace every assistant answer by the target's own, which a draft head must predict.

Finished rows are in FILE.jsonl.partial until FILE.jsonl is complete, and the same command continues with it after an
interruption; --batch, --head and --num-speculative-tokens may change. To start over, delete the .partial file.

examples:
  eagle-data regenerate --target Qwen3-4B --data chats.jsonl --output answers.jsonl --temperature 0.7
  eagle-data regenerate --target Qwen3-4B --head out/head --data preset:ultrachat --limit 20000 --dedupe prompt \\
      --system 'You are a helpful assistant.' --system '' --output answers.jsonl
"""
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
"""Sampling parameters that must not change when a file is continued."""


@dataclass
class RegenerateReport(Counts):
    """Counts of a regeneration."""

    answers: int = 0
    tokens: int = 0
    cut: int = 0
    """Answers cut at `max_tokens`; their conversations end there."""
    looping: int = 0
    """Answers left out because they loop; their conversations end before them."""
    too_long: int = 0
    """Prompts that fill the target's context; their conversations end before them."""
    dropped: int = 0
    """Conversations without any answer left."""


@dataclass(frozen=True)
class RegenerateConfig:
    """How to generate answers. With a seed, answers depend only on it and on the conversation."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """The seed is mixed with conversation and turn. Without a seed, sampled answers differ between runs."""
    systems: tuple[str, ...] = ()
    """System prompts. The seed chooses one for each conversation, instead of its own; "" is none."""
    least_distinct: float = 0.0
    """Minimum share of distinct 4-grams; answers with fewer are left out."""


def regenerations(
    engine: Engine, conversations: Iterable[Conversation], config: RegenerateConfig
) -> Iterator[Regeneration]:
    """Yield a task for each conversation that replaces every assistant answer by the target's own.

    Answers that call tools are kept, since tool results depend on them, and so is plain text. A conversation without an
    answer gets one. It ends with an answer that `max_tokens` cut, before an answer that loops, and before a prompt that
    fills the context; it is dropped if no answer is left. The tasks raise DataError without a chat template.
    """
    seen: Counter[int] = Counter()  # repeated prompts are numbered, so that their answers differ
    for position, conversation in enumerate(conversations):
        key = conversation.prompt_key()
        yield Regeneration(engine, config, position, conversation, seen[key])
        seen[key] += 1


def regenerate_to_file(
    engine: Engine,
    conversations: Iterable[Conversation],
    config: RegenerateConfig,
    output: str | Path,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    total: int | None = None,
) -> tuple[int, RegenerateReport]:
    """Regenerate conversations into a jsonl file; return the number of rows and the counts.

    Rows are written and continued as by `make_to_file`. `settings`: what else the rows depend on. `total`: of the
    progress bar, if the number of conversations is unknown. Raises DataError if the data has changed, OutputError as
    `make_to_file`.
    """
    compared = {
        **text_settings(engine.target),
        **{name: getattr(config.params, name) for name in _SETTINGS},
        "system": list(config.systems),
        "least_distinct": config.least_distinct,
        **(settings or {}),
    }
    if isinstance(conversations, Sequence):
        total = len(conversations)
    report, tasks, seen = RegenerateReport(), regenerations(engine, conversations, config), 0
    with open_partial(output, compared, overwrite) as part:

        def following(running: int) -> Regeneration | None:
            nonlocal seen
            for task in tasks:
                seen += 1
                if not part.check(task.position, task.key, task.source.origin):
                    return task
            return None

        for done in part.done.values():
            report.add(done.counts)
        bar: dict[str, Any] = {"desc": "regenerate", "unit": "conversation", "smoothing": 0.02}
        with progress_bar(total=total, initial=len(part.done), disable=not progress, **bar) as shown:
            for ended in run_tasks(engine, following):
                conversation = ended.result()
                row = as_line(conversation) if conversation is not None else b""
                part.add(ended.position, ended.key, ended.report.counts(), row)
                report.add(ended.report.counts())
                shown.update()
        return part.finish(seen, overwrite), report


class Regeneration(Task):
    """A conversation to answer, as a task of `run_tasks`."""

    def __init__(self, engine: Engine, config: RegenerateConfig, position: int, source: Conversation, repeat: int):
        """`position` is its index among the conversations; `repeat` counts earlier ones with the same prompt."""
        self.position, self.source, self.key = position, source, source.whole_key()
        self.report = RegenerateReport()
        self._engine, self._config, self._repeat = engine, config, repeat
        self._prompt_key = source.prompt_key()
        self._rest = self._with_system(list(source.messages))
        self._messages: list[Message] = []
        self._ended = False

    def submit(self) -> RequestState | None:
        if not self._advance():
            return None
        target = self._engine.target
        if target.tokenizer is None or not target.tokenizer.has_chat_template:
            raise DataError("the target has no chat template, so it cannot answer conversations")
        prompt = prompt_tokens(target.tokenizer, self._so_far)
        if len(prompt) >= target.context_length:
            self.report.too_long += 1
            return None
        params = self._config.params
        if params.seed is not None:
            params = replace(params, seed=seed_of(params.seed, self._prompt_key, self._repeat, self.report.answers))
        request = self._engine.prepare(prompt, params)
        self._engine.submit(request)
        return request

    def take(self, request: RequestState) -> None:
        """Add an answer to the conversation, and end it if the answer loops or was cut."""
        output = self._engine.output(request)
        if output.finish_reason == "error":
            raise DataError(f"{self.source.origin}: the target could not answer: {output.error}")
        if is_loop(output.tokens, self._config.least_distinct):
            self.report.looping += 1
            self._ended = True
            return
        self._messages.append(Message("assistant", output.text))
        self.report.answers += 1
        self.report.tokens += len(output.tokens)
        if output.finish_reason == "length":
            self.report.cut += 1
            self._ended = True

    def result(self) -> Conversation | None:
        """Return the conversation up to the last answer; None if there is none."""
        if self.source.text is not None:
            return self.source
        while self._messages and self._messages[-1].role != "assistant":
            self._messages.pop()
        self.report.dropped = int(not self.report.answers)
        return self._so_far if self.report.answers else None

    @property
    def _so_far(self) -> Conversation:
        return replace(self.source, messages=tuple(self._messages))

    def _with_system(self, messages: list[Message]) -> list[Message]:
        """Return the messages with their system prompt replaced by one that the seed chooses."""
        systems = self._config.systems
        if not messages or not systems:
            return messages
        drawn = seed_of(self._config.params.seed or 0, self._prompt_key, self._repeat, "system") % len(systems)
        messages = [m for m in messages if m.role not in ("system", "developer")]
        return [Message("system", systems[drawn]), *messages] if systems[drawn] else messages

    def _advance(self) -> bool:
        """Move the original's messages over up to the next answer to generate; return False if there is none."""
        while self._rest and not self._ended:
            message = self._rest.pop(0)
            if message.role == "assistant" and self._asked and "tool_calls" not in message.extra:
                return True
            self._messages.append(message)
        return not self._ended and self._asked and self._messages[-1].role != "assistant"

    @property
    def _asked(self) -> bool:
        """Whether there is a user or tool message. Without one, a greeting of the assistant is not an answer."""
        return any(m.role not in ("system", "developer", "assistant") for m in self._messages)


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
    check_conversations(options.data_config(), options.split)
    target = options.loading.load(options.target)
    report = ReadReport()
    found = read_conversations(options.data_config(), options.split, tokenizer_of(target), report)
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
