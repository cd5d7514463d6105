"""Conversations whose answers are the target's own, which is what a draft head has to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.progress import progress_bar
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import text_settings
from eagle_mlx.text import is_loop

from ..conversation import Conversation, Message
from ..jsonl import as_line, open_partial
from ..rendering import prompt_tokens
from .loop import run_tasks, seed_of
from .report import Counts

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
"""What of the sampling parameters is compared before a file is continued."""


@dataclass
class RegenerateReport(Counts):
    """Counted while conversations are regenerated."""

    answers: int = 0
    tokens: int = 0
    cut: int = 0
    """Answers that ended at `max_tokens`; their conversations end there."""
    looping: int = 0
    """Answers left out because they loop; their conversations end before them."""
    too_long: int = 0
    """Turns whose prompt leaves no room in the target's context; their conversations end before them."""
    dropped: int = 0
    """Conversations of which nothing was left."""


@dataclass(frozen=True)
class RegenerateConfig:
    """How answers are made. With a seed the answers are a function of it and of the conversation alone."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """A seed is mixed with each conversation and turn; without one, sampled answers differ from run to run."""
    systems: tuple[str, ...] = ()
    """System prompts, one of which, drawn by the seed, takes the place of a conversation's own; empty text for none."""
    least_distinct: float = 0.0
    """Answers whose share of distinct 4-grams is less are left out."""


def regenerate(
    engine: Engine,
    conversations: Iterable[Conversation],
    config: RegenerateConfig,
    shown: tqdm[NoReturn] | None = None,
    skip: Callable[[Regeneration], bool] = lambda task: False,
) -> Iterator[Regeneration]:
    """Replace every assistant answer by the target's own; yield each conversation as soon as its last answer is made.

    The answers of a conversation are made one after the other, each on top of the new answers before it; a
    conversation that ends without an answer gets one. An answer that calls tools stays as it is, since the replies
    depend on it; so does plain text. A conversation ends with an answer that `max_tokens` cut, before one that loops,
    and before a prompt that leaves no room in the context; what is left without any answer is dropped. The batch is
    kept full across conversations and turns. Those to `skip` are left out. Raises DataError for a target without a
    chat template.
    """
    tasks = (task for task in _regenerations(engine, conversations, config) if not skip(task))
    return run_tasks(engine, lambda _: next(tasks, None), shown)


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
    """Answer conversations, as `regenerate` does, into a jsonl file; return its rows, and the counts of them all.

    Rows are kept in `OUTPUT.partial` as soon as they are made. If there is such a file, those that it holds are not
    made again, so the same call after any interruption continues with it, and the output is the same to the byte. So it
    is with other batch sizes and proposers, as far as the target's arithmetic does not depend on them. `settings` are
    compared as well, for whatever else the rows depend on. `total` is for the progress bar, if the number of
    conversations is not known.

    Raises OutputError if the output exists and `overwrite` is not set, or the partial file was begun with other
    settings or by a process that still runs; DataError if the data has changed since.
    """
    compared = _settings(engine, config) | dict(settings or {})
    if isinstance(conversations, Sequence):
        total = len(conversations)
    report = RegenerateReport()
    seen = 0
    with open_partial(output, compared, overwrite) as part:

        def is_done(task: Regeneration) -> bool:
            nonlocal seen
            seen += 1
            return part.check(task.position, task.key, task.source.origin)

        for done in part.done.values():
            report.add(done.counts)
        bar = progress_bar(
            total=total,
            initial=len(part.done),
            desc="regenerate",
            unit="conversation",
            disable=not progress,
            smoothing=0.02,
        )
        with bar as shown:
            for ended in regenerate(engine, conversations, config, shown, is_done):
                conversation = ended.result()
                row = as_line(conversation) if conversation is not None else b""
                part.add(ended.position, ended.key, ended.report.counts(), row)
                report.add(ended.report.counts())
                shown.update()
        return part.finish(seen, overwrite), report


class Regeneration:
    """A conversation that is answered, as a task of `run_tasks`: its messages so far, and those still to come."""

    def __init__(self, engine: Engine, config: RegenerateConfig, position: int, source: Conversation, repeat: int):
        """`position`: its number among those to answer; `repeat`: how many before it have the same prompt."""
        self.position, self.source = position, source
        self.report = RegenerateReport()
        """Of this conversation alone."""
        self._engine, self._config, self._repeat = engine, config, repeat
        self._prompt_key = source.prompt_key()
        self._rest = self._with_system(list(source.messages))
        self._messages: list[Message] = []
        self._ended = False

    @property
    def key(self) -> int:
        return self.source.whole_key()

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
        """Put an answer into the conversation, which it may end."""
        output = self._engine.output(request)
        if output.finish_reason == "error":
            raise DataError(f"{self.source.origin}: no answer could be made: {output.error}")
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

    def give_up(self, request: RequestState) -> bool:
        return False

    def stop(self, request: RequestState) -> None:
        """What was said so far is the result."""

    def result(self) -> Conversation | None:
        """What was said up to the last answer; None if none was made."""
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
        """The messages with the system prompt that the seed draws in place of their own."""
        systems = self._config.systems
        if not messages or not systems:
            return messages
        drawn = seed_of(self._config.params.seed or 0, self._prompt_key, self._repeat, "system") % len(systems)
        messages = [m for m in messages if m.role not in ("system", "developer")]
        return [Message("system", systems[drawn]), *messages] if systems[drawn] else messages

    def _advance(self) -> bool:
        """Move the original's messages over up to the next answer to make; False if there is none."""
        while self._rest and not self._ended:
            message = self._rest.pop(0)
            if message.role == "assistant" and self._asked and "tool_calls" not in message.extra:
                return True
            self._messages.append(message)
        return not self._ended and self._asked and self._messages[-1].role != "assistant"

    @property
    def _asked(self) -> bool:
        """Whether anyone but the system has spoken: a greeting of the assistant's is no answer."""
        return any(m.role not in ("system", "developer", "assistant") for m in self._messages)


def _regenerations(
    engine: Engine, conversations: Iterable[Conversation], config: RegenerateConfig
) -> Iterator[Regeneration]:
    """The conversations in order; those with the same prompt are told apart, so that answers differ."""
    seen: Counter[int] = Counter()
    for position, conversation in enumerate(conversations):
        key = conversation.prompt_key()
        yield Regeneration(engine, config, position, conversation, seen[key])
        seen[key] += 1


def _settings(engine: Engine, config: RegenerateConfig) -> dict[str, Any]:
    params = asdict(config.params)
    return {
        **text_settings(engine.target),
        **{name: params[name] for name in _SETTINGS},
        "system": list(config.systems),
        "least_distinct": config.least_distinct,
    }
