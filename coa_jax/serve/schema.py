"""Defines the schemas of client requests: the fields of OpenAI's API, and some of vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

_INT32 = 2**31 - 1
_MOST_STOPS, _STOP_CHARS, _MOST_PROMPTS, _MOST_PARTS = 32, 256, 64, 256
Probability = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    # If an unknown field were ignored, the client would receive something other than it asked for.
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """Options of a stream.

    Attributes:
        include_usage: whether the last chunk contains the token usage.
        continuous_usage_stats: not supported; must be False.
    """

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class TextPart(_Strict):
    """A part of a message's content; only parts of the type "text" are supported."""

    type: Literal["text"]
    text: str


def _content(value: Any) -> str:
    """Returns the text of a message's content.

    This validator replaces a union of types, whose errors would mention names that only pydantic
    knows.
    """
    if isinstance(value, str):
        return value
    several = isinstance(value, list) and 1 <= len(value) <= _MOST_PARTS
    if not several or not all(map(_is_text, value)):
        raise ValueError(
            f"must be a string or a list of 1 to {_MOST_PARTS} parts of the type 'text'"
        )
    return "".join(part["text"] for part in value)


def _is_text(part: Any) -> bool:
    text_part = isinstance(part, dict) and part.keys() == {"type", "text"}
    return text_part and part["type"] == "text" and isinstance(part["text"], str)


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=_MOST_PARTS)]


class CalledFunction(BaseModel):
    """The function that an earlier assistant message called.

    Attributes:
        name: name under which the client offered the function.
        arguments: arguments, as the text of a JSON object.
    """

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A function call in an earlier assistant message of the conversation.

    Attributes:
        type: "function", the only supported type.
        function: the called function and its arguments.
    """

    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of the conversation in a chat request; unknown fields are ignored.

    Attributes:
        role: author of the message; ``tool`` is the result of a function call.
        content: text of the message; a list of text parts is joined.
        tool_calls: calls of the client's functions, in a message of the assistant.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | Parts)]
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MOST_PARTS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls(cls, value: Any) -> Any:
        calls = isinstance(value, dict) and value.get("tool_calls")
        if calls and value.get("role") != "assistant":
            raise ValueError("tool_calls are for messages of the assistant only")
        # A message that consists of calls has no content.
        return {**value, "content": ""} if calls and value.get("content") is None else value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    texts = isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)
    if not texts or len(stops) > _MOST_STOPS or not all(1 <= len(s) <= _STOP_CHARS for s in stops):
        raise ValueError(
            f"must be a string of 1 to {_STOP_CHARS} characters or a list of at most {_MOST_STOPS}"
        )
    return tuple(stops)


Stop = Annotated[str, Field(min_length=1, max_length=_STOP_CHARS)]
Stops = Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None


class Sampling(_Strict):
    """The fields that requests for chat and for text completions have in common.

    The fields have the meanings of OpenAI's API; ``top_k``, ``include_stop_str_in_output``,
    ``prompt_logprobs`` and ``repetition_penalty`` are fields of vLLM. A field that this server does
    not support must have a value without effect, such as 0 for ``presence_penalty``.
    """

    model: str
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    seed: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops, json_schema_input_type=Stops)] = ()
    include_stop_str_in_output: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: str | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    store: bool | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _streams(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams only")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not available in streams")
        return self


class ResponseFormat(_Strict):
    """The field ``response_format`` of a request; only the type "text" is supported."""

    type: Literal["text"]


class Function(BaseModel):
    """The description of a function that the client offers to the policy.

    Attributes:
        name: what the policy writes to call the function.

    The policy sees all fields of the function, including fields that this class does not list.
    """

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]


class FunctionTool(_Strict):
    """An entry of the request's ``tools``: a function that the policy may call."""

    type: Literal["function"]
    function: Function


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions, with the fields of OpenAI's API and of vLLM.

    If ``tool_choice`` is "none", the policy's text is not searched for function calls. Any other
    value is treated as "auto", because the server cannot force the policy to call a function.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[FunctionTool], Field(max_length=_MOST_PARTS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.stream and self.top_logprobs:
            raise ValueError("top_logprobs are not available in streams")
        last = self.messages[-1].role == "assistant"
        if self.continue_final_message and not last:
            raise ValueError("continue_final_message needs a last message of the assistant")
        opens = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and opens:
            raise ValueError("continue_final_message excludes add_generation_prompt")
        return self

    @property
    def calls(self) -> bool:
        """Whether completions may call functions of the client."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of a completion; None for as many as fit in the context."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """Parses one or several prompts, quickly, because a list may have a million token ids."""
    several: Any = [value] if isinstance(value, str) else value
    kinds: set[Any] = set(map(type, several)) if isinstance(several, list) else set()
    if kinds == {int}:
        several, kinds = [several], {list}
    good = kinds == {str} or (kinds == {list} and all(map(_are_ids, several)))
    if not good or len(several) > _MOST_PROMPTS:
        raise ValueError(
            "must be a string, a list of token ids from 0 on, or a list of at most "
            f"{_MOST_PROMPTS} of either"
        )
    return tuple(several)


def _are_ids(prompt: list[Any]) -> bool:
    return set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) <= _INT32


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT32)]], Field(min_length=1)]


Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS)]
)


class TextRequest(Sampling):
    """The body of POST /v1/completions, with the fields of OpenAI's API.

    ``max_tokens`` is 16 by default, as in OpenAI's API. With null, a completion may have as many
    tokens as fit in the context, as in a chat request. With 0, the response contains no completion,
    but only the echoed prompt and its log-probabilities.
    """

    prompt: Annotated[
        tuple[str | list[int], ...], PlainValidator(_prompts, json_schema_input_type=Prompts)
    ]
    max_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _combinations(self) -> TextRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens of 0 needs echo")
        if self.stream and (self.echo or self.logprobs):
            raise ValueError("echo and more than the sampled logprobs are not available in streams")
        return self
