"""`eagle-data regenerate`: replace answers by the target's own, in a file that can be continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.progress import progress_bar
from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.text import is_loop

from ..conversation import Conversation, Message
from ..jsonl import as_line, open_partial
from ..rendering import prompt_tokens
from ..template import answer_message
from .loop import Counts, Task, run_tasks, seed_of, text_settings

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
"""Sampling parameters that must not change when a file is continued."""


@dataclass(frozen=True)
class RegenerateReport(Counts):
    answers: int = 0
    tokens: int = 0
    cut: int = 0
    """Answers cut at `max_tokens`; their conversations end there."""
    looping: int = 0
    """Answers left out because they loop; their conversations end before them."""
    too_long: int = 0
    """Prompts that fill the target's context; their conversations end before them."""
    dropped: int = 0


@dataclass(frozen=True)
class RegenerateConfig:
    """Settings to generate answers. With a seed, answers depend only on it and on the conversation."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """The seed is mixed with conversation and turn. Without a seed, sampled answers differ between runs."""
    systems: tuple[str, ...] = ()
    """System prompts. The seed chooses one for each conversation, instead of its own; "" is none."""
    least_distinct: float = 0.0


def regenerations(
    engine: Engine, conversations: Iterable[Conversation], config: RegenerateConfig
) -> Iterator[Regeneration]:
    """Yield a task for each conversation that replaces every assistant answer by the target's own, or adds one.

    Answers that call tools stay, since tool results depend on them, and so does plain text. A conversation ends after
    an answer that `max_tokens` cut, and before one that loops or a prompt that fills the context; without any answer,
    it is dropped. The tasks raise DataError without a chat template.
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
    enough: Callable[[int], bool] = lambda begun: False,
) -> tuple[int, RegenerateReport]:
    """Regenerate conversations into a jsonl file, as `make_to_file` does; return the number of rows and the counts.

    `settings`: what else the rows depend on. `total`: number of conversations, if unknown. `enough`: called with the
    number of conversations begun; once true, no other begins, but those that run finish. Raises DataError if the data
    has changed, OutputError as `make_to_file`.
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
        begun = len(part.done)

        def following(running: int) -> Regeneration | None:
            nonlocal seen, begun
            for task in tasks:
                seen += 1
                if not part.check(task.position, task.key, task.origin) and not enough(begun):
                    begun += 1
                    return task
            return None

        bar: dict[str, Any] = {"desc": "regenerate", "unit": "conversation", "smoothing": 0.02, "disable": not progress}
        with progress_bar(total=total, initial=len(part.done), **bar) as shown:
            for ended in run_tasks(engine, following):
                conversation = ended.result()
                row = as_line(conversation) if conversation is not None else b""
                part.add(ended.position, ended.key, ended.report.counts(), row)
                shown.update()
        for done in part.done.values():
            report = report.plus(done.counts)
        return part.finish(seen), report


class Regeneration(Task):
    def __init__(self, engine: Engine, config: RegenerateConfig, position: int, source: Conversation, repeat: int):
        """`position` is its index among the conversations; `repeat` counts earlier ones with the same prompt."""
        self.position = position
        self.source = source
        self.origin = source.origin
        self.key = source.whole_key()
        self.report = RegenerateReport()
        self._target = engine.target
        self._config = config
        self._place = (source.prompt_key(), repeat)
        self._rest = self._with_system(list(source.messages))
        self._messages: list[Message] = []
        self._ended = False

    def next(self) -> tuple[list[int], SamplingParams] | None:
        if not self._advance():
            return None
        target = self._target
        if target.tokenizer is None or not target.tokenizer.has_chat_template:
            raise DataError("the target has no chat template to answer conversations; name one with --chat-template")
        prompt = prompt_tokens(target.tokenizer, self._so_far)
        if len(prompt) >= target.context_length:
            self.report = self.report.plus({"too_long": 1})
            return None
        params = self._config.params
        if params.seed is not None:
            params = replace(params, seed=seed_of(params.seed, *self._place, self.report.answers))
        return prompt, params

    def take(self, request: RequestState, output: Output) -> None:
        """Add an answer to the conversation, and end it if the answer loops or was cut."""
        loops, cut = is_loop(output.tokens, self._config.least_distinct), output.finish_reason == "length"
        self._ended = loops or cut
        if loops:
            self.report = self.report.plus({"looping": 1})
        else:
            assert self._target.tokenizer is not None
            self._messages.append(answer_message(self._target.tokenizer, self._so_far, output.text))
            self.report = self.report.plus({"answers": 1, "tokens": len(output.tokens), "cut": int(cut)})

    def give_up(self, tokens: Sequence[int]) -> bool:
        """Give up an answer that will count as a loop even if no 4-gram repeats from here to `max_tokens`."""
        config = self._config
        loops = is_loop(tokens, config.least_distinct, coming=config.params.max_tokens - len(tokens))
        self.report = self.report.plus({"looping": int(loops)})
        return loops

    def result(self) -> Conversation | None:
        """Return the conversation up to the last answer; None if there is none."""
        if self.source.text is not None:
            return self.source
        while self._messages and self._messages[-1].role != "assistant":
            self._messages.pop()
        if self.report.answers:
            return self._so_far
        self.report = replace(self.report, dropped=1)
        return None

    @property
    def _so_far(self) -> Conversation:
        return replace(self.source, messages=tuple(self._messages))

    def _with_system(self, messages: list[Message]) -> list[Message]:
        systems = self._config.systems
        if not messages or not systems:
            return messages
        system = systems[seed_of(self._config.params.seed or 0, *self._place, "system") % len(systems)]
        messages = [m for m in messages if m.role not in ("system", "developer")]
        return [Message("system", system), *messages] if system else messages

    def _advance(self) -> bool:
        """Move the original's messages over up to the next answer to generate; return False if there is none."""
        while self._rest and not self._ended:
            message = self._rest.pop(0)
            if message.is_answer and self._has_question:
                return True
            self._messages.append(message)
        return not self._ended and self._has_question and self._messages[-1].role != "assistant"

    @property
    def _has_question(self) -> bool:
        return any(message.asks for message in self._messages)
