"""The recorded answers of the package `canitoolcall`: nine model families, whole and streamed.

Each answer is judged by the package's own checks. A failure must be in `POLICY`, with its reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import ChunkStrategy, split
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import CheckResult, Observation, ParsedToolCall, ParseResult, Status

from eagle_mlx.serve.chat import AnswerParser, ChatFormat, Delta, ToolOffer, whole_calls
from tests.full import in_full, in_turn
from tests.serve.chat.formats import ADDED, THINK_TAGS, TOOL_TAGS, format_with_template
from tests.serve.chat.test_call_formats import FAMILIES, loop

LEAST_PASSED = 445
POLICY: dict[str, str] = {}
"""Answers that are not parsed as the package expects, and why."""

GLM_TAGS = (*TOOL_TAGS, *THINK_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK_TAGS = ADDED["deepseek"]
DSML_TAGS = (*THINK_TAGS, "\uff5cDSML\uff5c")
MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]")
KIMI_TAGS = tuple(
    f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Qwen/Qwen3-": (FAMILIES["Qwen2.5, Qwen3"].template, (*TOOL_TAGS, *THINK_TAGS)),
    "Qwen/": (FAMILIES["Qwen3-Coder, Qwen3.5"].template, (*TOOL_TAGS, *THINK_TAGS)),
    "openai/": (FAMILIES["gpt-oss"].template, ADDED["gpt-oss"]),
    "deepseek-ai/DeepSeek-V3-": (FAMILIES["DeepSeek V3, R1"].template + "```json", DEEPSEEK_TAGS[2:]),
    "deepseek-ai/DeepSeek-V3.1": (FAMILIES["DeepSeek V3, R1"].template, DEEPSEEK_TAGS),
    "deepseek-ai/": ("{{ messages }}", DSML_TAGS),
    "moonshotai/Kimi-K2-Instruct": (FAMILIES["Kimi K2"].template, KIMI_TAGS),
    "moonshotai/Kimi-K2": (FAMILIES["Kimi K2"].template, (*KIMI_TAGS, *THINK_TAGS)),
    "moonshotai/Kimi-K3": ("{{ messages }}", FAMILIES["Kimi K3"].vocabulary),
    "zai-org/": (FAMILIES["GLM-4.5 to GLM-4.7"].template, GLM_TAGS),
    "meta-llama/": (FAMILIES["Llama 3.1 to 3.3, Llama 4"].template, ("<|python_tag|>", "<|python_start|>")),
    "mistralai/Magistral-Small-2506": (loop("[TOOL_CALLS]{{ tool_call.name }}") + "<think></think>", MISTRAL_TAGS),
    "mistralai/": (loop("[TOOL_CALLS]{{ tool_call.name }}"), MISTRAL_TAGS),
    "google/": (
        FAMILIES["Gemma 4"].template,
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>', "<|tool_response>"),
    ),
}
"""For each model, by the beginning of its name: the characteristic part of its template, and the vocabulary's tags."""
HERMES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")
THINKING_MISTRAL = ("Magistral-Small-2509", "Reasoning", "Mistral-Small-4", "Mistral-Medium-3.5")


def model_of(fixture: Fixture) -> tuple[str, tuple[str, ...]]:
    name = fixture.reference_model
    if fixture.family == "qwen3-xml":
        return MODELS["Qwen/"]
    template, tags = next(value for prefix, value in MODELS.items() if name.startswith(prefix))
    if any(part in name for part in THINKING_MISTRAL):
        tags = (*tags, "[THINK]", "[/THINK]")
    return template, tags


def result(deltas: Sequence[Delta]) -> ParseResult:
    calls = whole_calls(delta.tool_call for delta in deltas)
    return ParseResult(
        "".join(delta.content for delta in deltas) or None,
        "".join(delta.reasoning for delta in deltas) or None,
        tuple(ParsedToolCall(call.name, call.arguments) for call in calls),
    )


def prompt_end(fixture: Fixture) -> str:
    """Return the end of the prompt, which may open a thought."""
    family = family_for(fixture)
    assert family is not None
    models = {model.repo: model.default_generation_prompt for model in family.reference_models}
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    return models[fixture.reference_model] or ""


def read(fixture: Fixture, format: ChatFormat, parts: Sequence[str], enforced: bool = False) -> ParseResult:
    assert format.tokenizer is not None
    prompt = format.tokenizer.encode(prompt_end(fixture), add_special_tokens=False)
    reader = AnswerParser(format, ToolOffer.of(fixture.tools), format.starts_in_reasoning(prompt), enforced=enforced)
    deltas = [delta for part in parts for delta in reader.push(part)]
    return result([*deltas, *reader.finish(not fixture.truncated)])


def units(text: str, tags: Sequence[str]) -> list[str]:
    """Cut a text like a tokenizer: tags are whole, and words begin with their spaces."""
    return re.findall("|".join(map(re.escape, tags)) + r"|\s?\w{1,6}|\s|.", text, re.DOTALL)


STRATEGIES = [
    ChunkStrategy.parse(name)
    for name in ("one", "special", "token", *(f"rand:{seed}:8" for seed in range(1, in_full(6, 3))), "char:0", "char:1")
]


def streams_of(fixture: Fixture, number: int) -> tuple[ChatFormat, dict[str, list[str]]]:
    """Return the format of an answer's model, and its parts in each way of cutting it, or in some of them in turn."""
    template, tags = model_of(fixture)
    parts, whole = units(fixture.raw_output, tags), fixture.raw_output
    assert "".join(parts) == whole
    return format_with_template(template, tags), {
        way.id: ["".join(group) for group in split(list(whole) if way.kind == "char" else parts, way, set(tags))]
        for way in in_turn(STRATEGIES, number % 4, of=4)
    }


@cache
def answers() -> list[tuple[Fixture, ChatFormat, dict[str, list[str]]]]:
    return [(fixture, *streams_of(fixture, number)) for number, fixture in enumerate(load_fixtures(None))]


def checked(fixture: Fixture, format: ChatFormat, streams: dict[str, list[str]]) -> list[CheckResult]:
    whole = fixture.raw_output
    results = {name: read(fixture, format, pieces) for name, pieces in streams.items()}
    family = family_for(fixture)
    assert family is not None
    return run_checks(fixture, family, Observation(nonstream=read(fixture, format, [whole]), streams=results))


@cache
def cases() -> dict[str, list[CheckResult]]:
    return {fixture.id: checked(fixture, format, streams) for fixture, format, streams in answers()}


def test_at_least_445_recorded_answers_are_parsed_as_expected() -> None:
    statuses = {name: case_status(rows) for name, rows in cases().items()}
    counts = Counter(statuses.values())
    failures = {name for name, status in statuses.items() if status not in (Status.PASS, Status.SOFT_PASS)}
    assert failures == set(POLICY)
    assert counts[Status.PASS] + counts[Status.SOFT_PASS] >= LEAST_PASSED
    assert counts.total() == 469


@pytest.mark.parametrize("check", ["arguments_json", "arguments_schema", "stream_equals_nonstream", "split_invariance"])
def test_no_recorded_answer_fails_a_check_of_arguments_or_streams(check: str) -> None:
    rows = [(name, row) for name, rows in cases().items() for row in rows if row.check == check]
    assert [(name, row.strategy, row.detail) for name, row in rows if row.status != Status.PASS] == []


def test_no_stream_differs_if_the_calls_of_recorded_answers_come_in_pieces() -> None:
    count = 0
    for fixture, format, streams in answers():
        if format.calls is None or format.calls.form is None:
            continue
        count += 1
        whole = read(fixture, format, [fixture.raw_output], enforced=True)
        assert [id for id, parts in streams.items() if read(fixture, format, parts, enforced=True) != whole] == []
    assert count > 50
