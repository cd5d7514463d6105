"""Requests: OpenAI's fields and those of similar servers. Known fields that would have no effect are refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping
from math import inf
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema, core_schema

from eagle_mlx.sampling_params import Acceptance

from ..speculation import Mode
from .media import Media, Pictures, without_data

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
"""Tiers that OpenAI's clients may request. This server has only the default one."""
SERVICE_TIER = "default"


def _biases(value: object) -> object:
    """Check the entries up to the first invalid one, because a list of all could be long."""
    for key, bias in value.items() if isinstance(value, dict) else ():
        if not re.fullmatch("[0-9]{1,10}", key):
            raise ValueError(f"the keys must be token ids, not {key[:40]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
    return value


class Body(BaseModel):
    """A request body, or a part of one. `received.read` ignores unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ByType:
    """Reads a union of models by their field `type`: no type as the first model, unknown types as one that takes any.

    Tags are in brackets, so that errors name fields only.
    """

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tags = dict[str | None, str]()
        choices = dict[Hashable, CoreSchema]()
        for model in get_args(union):
            types = [name for name in get_args(model.model_fields["type"].annotation) if name]
            tag = f"<{next(iter(types), '')}>"
            tags |= dict.fromkeys([*types, *([] if tags else [None])], tag)
            choices[tag] = handler.generate_schema(model)

        def tag_of(value: object) -> str:
            given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            return tags.get(given if given is None else str(given), "<>")

        return core_schema.tagged_union_schema(
            choices,
            tag_of,
            custom_error_type="unknown_block",
            custom_error_message=f"the type must be one of {', '.join(filter(None, tags))}",
        )


BY_TYPE = ByType()


class EventFormat(Body):
    """The stream options that OpenAI's three APIs share."""

    include_obfuscation: bool | None = None
    per_token: bool | None = None  # Send an event for each token. By default, one event holds all tokens of a round.


class StreamOptions(EventFormat):
    include_usage: bool | None = None
    include_draft_n_accepted: bool | None = None
    """Report the accepted draft tokens of each chunk. They come in chunks of their own."""


class JsonSchema(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # the schema is enforced either way


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """With `json_object`, as llama.cpp accepts it and older versions of instructor send it."""


class Extensions(Body):
    """The model, and fields that this server adds to OpenAI's and Anthropic's APIs."""

    model: str | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_p: float | None = None
    repetition_penalty: float | None = None
    spec_decode: Mode | None = None  # the only drafter: the loaded head or draft model by its mode, `ngram`, or `none`
    num_speculative_tokens: int | None = Field(None, ge=0, lt=2**31)
    memory: bool | None = None
    """Whether earlier texts of the same key and salt may draft for this one, and this one for later ones."""
    learn: bool | None = None
    """Whether the head may learn from this text, if the server learns (`--learn`); by default, what `memory` says."""
    acceptance: Acceptance | None = None
    """The rule that accepts drafts of sampled text. All but `threshold` are lossless."""
    acceptance_threshold: float | None = Field(None, ge=1e-6, le=1)
    """The least probability of a draft token for `threshold`."""
    t_max_predict_ms: float | None = Field(None, ge=0)
    """Limit from the first token to the end of an answer; 0 is none. As in llama.cpp, but not only at line ends."""
    cache_salt: str | None = Field(None, min_length=1)
    """Requests share prefix cache entries only if their salts are equal. The name is vLLM's."""

    @property
    def answer_seconds(self) -> float:
        """The time limit of an answer, from its first token."""
        return self.t_max_predict_ms / 1000 if self.t_max_predict_ms else inf


class ChatExtensions(Extensions):
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, of the assistant. By default it does if the API says so."""

    def extensions(self) -> dict[str, Any]:
        """Return the fields that were given, as Chat Completions names them."""
        return self.model_dump(include=set(ChatExtensions.model_fields), exclude_none=True)


class OpenAIRequest(Extensions):
    """Fields that OpenAI's three APIs share."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    # Ignored: these concern OpenAI's own servers.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    metadata: dict[str, str] | None = None
    service_tier: ServiceTier | None = None


class ChoicesRequest(OpenAIRequest):
    """Fields that Chat Completions and Completions share."""

    max_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    stop: str | Many[str] | None = None
    stop_token_ids: Many[Id] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_biases)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # as with `metadata`, nothing is stored
    # Not supported: other servers' names of limits on the text. An answer without them would be wrong.
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None
    grammar: None = None
    min_tokens: Literal[0] | None = None

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """`response_format` as it was sent."""
        given = self.response_format
        return None if given is None else given.model_dump(by_alias=True, exclude_none=True)

    @property
    def has_schema(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def drafts_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_draft_n_accepted)


class CompletionRequest(ChoicesRequest):
    prompt: str | Many[str] | Many[Id] | Many[Many[Id]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1)
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; a list of token ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(token, int) for token in self.prompt):
            return [self.prompt]  # type: ignore[list-item]  # checked by the line above
        return list(self.prompt)  # type: ignore[arg-type]  # so they are strings or lists


class MessagePart(Body):
    type: Literal["text", "refusal", "thinking"]
    text: str | None = None
    thinking: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    cache_control: Any = None
    signature: Any = None

    @property
    def thought(self) -> str:
        if isinstance(self.thinking, str):
            return self.thinking
        return "".join(str(part.get("text", "")) for part in self.thinking or ())  # as Mistral's clients send it


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Annotated[MessagePart | Media, BY_TYPE, BeforeValidator(without_data)]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under vLLM's newer name
    tool_calls: Many[MessageCall] | None = None
    tool_call_id: str | None = None
    # Fields that clients send back from an answer of this server or of OpenAI.
    refusal: str | None = None
    annotations: list[Any] | None = None
    id: Any = None
    cache_control: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    audio: None = None
    function_call: None = None

    def plain(self, pictures: Pictures, where: str) -> dict[str, Any]:
        """Return the message without fields that templates ignore, with marks for images, which `pictures` collects."""
        plain = self.model_dump(include=_TOLD - {"content"}, exclude_none=True)
        if isinstance(self.content, list):
            plain["content"] = "".join(
                pictures.text(part, f"{where}.content[{at}]")
                if isinstance(part, Media)
                else part.text or part.refusal or ""
                for at, part in enumerate(self.content)
            )
            if thoughts := "".join(part.thought for part in self.content if isinstance(part, MessagePart)):
                plain.setdefault("reasoning_content", thoughts)
        elif (text := self.refusal if self.content is None else self.content) is not None:
            plain["content"] = text
        for call in plain.get("tool_calls", ()):
            call.pop("index", None)
        return plain


_TOLD = {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"}


class FunctionDefinition(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = None


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ToolSubset(Body):
    mode: Literal["auto", "required"]
    tools: Many[NamedTool]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


class ReasoningLimit(Body):
    max_tokens: int | None = Field(None, ge=0)


class ChatRequest(ChatExtensions, ChoicesRequest):
    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, BY_TYPE] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Many[Literal["text"]] | None = None
    # For templates that use them.
    reasoning_effort: str | None = None
    reasoning: ReasoningLimit | None = None
    thinking_budget: int | None = Field(None, ge=0)
    thinking_token_budget: int | None = Field(None, ge=0)  # vLLM's name of the same
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Any = None  # ignored: it changes no text, and n-grams draft from the prompt, which mostly has it too
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None

    _pictures: Pictures | None = PrivateAttr(None)
    _without: Collection[str] = PrivateAttr(())

    def with_pictures(self, pictures: Pictures) -> Self:
        """Return the request itself, with images for the marks that its messages have already."""
        self._pictures = pictures
        return self

    def without_tools(self, names: Collection[str]) -> Self:
        """Return the request itself, whose prompt leaves out these tools. The model may call them even so."""
        self._without = names
        return self

    def is_seen(self, tool: Mapping[str, Any]) -> bool:
        """Return whether the prompt describes a tool."""
        return tool["function"]["name"] not in self._without

    def plain_messages(self) -> tuple[list[dict[str, Any]], Pictures]:
        """Return the messages for a template with marks for images, and the images. Raises ApiError 400 if the last is
        of a kind that no model here reads."""
        place, last = f"messages[{len(self.messages) - 1}].content", self.messages[-1]
        before = next((message.role for message in reversed(self.messages) if message.role != "user"), "")
        is_own = last.role == "user" and before != "tool"  # some clients move images of results there
        pictures = self._pictures or Pictures(last.content if is_own else None, place)
        return [message.plain(pictures, f"messages[{at}]") for at, message in enumerate(self.messages)], pictures

    @property
    def most_tokens(self) -> int | None:
        """The limit on answer tokens, under its newer or older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def most_thought(self) -> int | None:
        given = [self.thinking_budget, self.thinking_token_budget, self.reasoning and self.reasoning.max_tokens]
        given.append((self.chat_template_kwargs or {}).get("thinking_budget"))
        return next((limit for limit in given if isinstance(limit, int) and limit >= 0), None)
