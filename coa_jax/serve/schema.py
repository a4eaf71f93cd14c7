"""Requests as clients send them: OpenAI's fields, and those that vLLM adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_INT32 = 2**31 - 1
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Probability = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    # A field that would be ignored in silence would change what a client believes to have got.
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """Of a stream: whether its last chunk has the usage."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation; fields that say nothing about its text are allowed and unused."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """Its content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Sampling(_Strict):
    """What chat and text completions have in common.

    Fields of the API that this server cannot honour may be sent with the value that means nothing.
    """

    model: str
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    seed: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
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

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ResponseFormat(_Strict):
    """Text is all there is."""

    type: Literal["text"]


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
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
    def limit(self) -> int | None:
        """Tokens of a completion; None for as many as there is room for."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT32)]], Field(min_length=1)]


class TextRequest(Sampling):
    """POST /v1/completions

    ``max_tokens`` is 16 where it is not sent, as OpenAI has it; null asks for as many as there is
    room for, as in a chat; 0 is for the log-probabilities of what is echoed.
    """

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=64)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=64)]
    )
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

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or several prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [part for part in self.prompt if not isinstance(part, int)]
        return several or [[part for part in self.prompt if isinstance(part, int)]]
