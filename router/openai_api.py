"""What clients may send: the fields of the OpenAI API, and vLLM's additions, with their limits.

Unknown fields are ignored, since clients add new ones often. Fields that are known but not
supported are refused unless they ask for nothing. Whatever is wrong raises BadRequest with the
field's dotted name. Knows no HTTP, no tokens and no workers.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from router import wire
from router.config import RouterConfig
from router.errors import BadRequest

MIN_TEMPERATURE = 0.01  # below it, but above 0: noise times 1/temperature overflows
MAX_INT = 2**63 - 1
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # fit for a header and a log line

_IGNORED_SAFELY: dict[str, tuple[Any, ...]] = {
    # known, not supported: the values that ask for nothing
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None, False),
    "prompt_embeds": (None,),
    "tools": (None,),
    "tool_choice": (None, "none", "auto"),
    "functions": (None,),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "return_tokens_as_token_ids": (None, False),
    "priority": (None, 0),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
}


def _is_prompt(value: Any) -> Any:
    """One prompt or several, as text or as token ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        first = value[0]
        if _all(value, str) or _all(value, int):
            return value
        if isinstance(first, list) and all(
            isinstance(ids, list) and ids and _all(ids, int) for ids in value
        ):
            return value
    raise ValueError("must be a string, or a list, not empty, of strings, token ids or such lists")


def _is_stop(value: Any) -> Any:
    if value is None or isinstance(value, str) or (isinstance(value, list) and _all(value, str)):
        return value
    raise ValueError("must be a string or a list of strings")


def _is_content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and _all(value, dict):
        return value
    raise ValueError("must be a string or a list of content parts")


def _all(values: list[Any], kind: type) -> bool:
    return all(type(value) is kind for value in values)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(_Fields):
    """``stream_options`` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(_Fields):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-MAX_INT - 1, le=MAX_INT)
    stop: Annotated[Any, AfterValidator(_is_stop)] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    request_id: str | None = Field(None, pattern=f"^{REQUEST_ID.pattern}$")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def limit(self) -> int | None:
        """Tokens asked for; None: as many as there is room for."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_all_chunks(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_is_prompt)]
    add_special_tokens: bool | None = None

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatMessage(BaseModel):
    """One message; what else it carries is for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_is_content)] = None


class ChatFields(_Fields):
    """What becomes a prompt through the chat template."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the template takes them."""
        for index, message in enumerate(self.messages):
            calls = getattr(message, "tool_calls", None)
            if message.content is None and not (message.role == "assistant" and calls):
                raise BadRequest(
                    f"messages.{index}.content: a message needs a content",
                    param=f"messages.{index}.content",
                )
        return [message.model_dump() for message in self.messages]

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the template; those that it is called with anyway cannot be replaced."""
        kwargs = dict(self.chat_template_kwargs or {})
        for name in ("messages", "add_generation_prompt"):
            kwargs.pop(name, None)
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs


class ChatRequest(ChatFields, GenerationFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeText(_Fields):
    """POST /tokenize of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    """POST /tokenize of a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Model = TypeVar("Model", bound=BaseModel)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def parse(kind: type[Model], fields: dict[str, Any]) -> Model:
    """A request of this kind; the error names the first wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{param}: {reason}", param=param) from None


def check_supported(fields: dict[str, Any]) -> None:
    """Refuse known fields that are not supported, unless their value asks for nothing."""
    for name in _IGNORED_SAFELY.keys() & fields.keys():
        value = fields[name]
        if not any(
            value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
            for harmless in _IGNORED_SAFELY[name]
        ):
            raise BadRequest(f"{name} is not supported by this server", param=name)


def check_generation(request: GenerationFields, config: RouterConfig) -> None:
    """The limits that concern several fields, or that the operator sets."""
    if request.n is not None and request.n > config.max_choices:
        raise BadRequest(f"n: at most {config.max_choices} choices", param="n")
    if request.n is not None and request.n > 1 and request.temperature == 0:
        raise BadRequest("n: must be 1 with temperature 0, where all answers are equal", param="n")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only with stream=true", param="stream_options")
    if request.limit is not None and (request.min_tokens or 0) > request.limit:
        raise BadRequest(f"min_tokens: above max_tokens ({request.limit})", param="min_tokens")
    stops = request.stop_strings
    if len(stops) > config.max_stop_strings:
        raise BadRequest(f"stop: at most {config.max_stop_strings} strings", param="stop")
    if any(not 0 < len(stop) <= config.max_stop_chars for stop in stops):
        raise BadRequest(f"stop: strings of 1 to {config.max_stop_chars} characters", param="stop")
    if len(request.stop_token_ids or ()) > config.max_stop_strings:
        raise BadRequest(
            f"stop_token_ids: at most {config.max_stop_strings} ids", param="stop_token_ids"
        )


def sampling(
    request: GenerationFields, seed: int, choice: int, eos_ids: tuple[int, ...]
) -> wire.Sampling:
    """How the workers choose tokens. ``max_tokens`` is filled in at admission."""
    temperature = 1.0 if request.temperature is None else request.temperature
    stop_ids = tuple(request.stop_token_ids or ())
    return wire.Sampling(
        max_tokens=0,
        min_tokens=request.min_tokens or 0,
        temperature=float(max(temperature, MIN_TEMPERATURE) if temperature else 0.0),
        top_k=max(request.top_k or 0, 0),
        top_p=float(1.0 if request.top_p is None else request.top_p),
        min_p=float(request.min_p or 0.0),
        seed=seed % 2**64,
        choice=choice,
        stop_ids=stop_ids if request.ignore_eos else tuple(dict.fromkeys(stop_ids + eos_ids)),
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
