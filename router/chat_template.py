"""Renders a model's chat template: messages to the prompt's text, as ``transformers`` renders it.

A template comes with a model, so it is somebody else's program: it runs in jinja2's immutable
sandbox. Knows no tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class TemplateError(Exception):
    """The template does not accept these messages; the message is the template's own reason."""


class GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``: marks the assistant's words for training.

    Here it only renders what is inside.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter: plain JSON, where jinja2's own escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """The date for system prompts that name it."""
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja2 as chat templates expect it."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    env.filters["tojson"] = to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    env.globals.update(helpers)
    return env


class ChatTemplate:
    """One compiled template and the special tokens that it may name (``bos_token``, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template, line {error.lineno}: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt's text; raises :class:`TemplateError` with the template's reason."""
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **template_kwargs,
            "messages": [plain_content(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error.message or error)) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The template met a value that it did not expect, as `None + "text"`.
            raise TemplateError(f"the chat template fails on these messages: {error}") from error


def plain_content(message: Message) -> dict[str, Any]:
    """The message with its content as one string: text parts are joined by newlines, none is empty.

    Templates of text models concatenate content; this is how vLLM gives it to them.
    """
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(part_texts(content))
    return {**message, "content": content}


def part_texts(parts: Any) -> Iterable[str]:
    """The texts of content parts; raises :class:`TemplateError` for any other kind of part."""
    if not isinstance(parts, Sequence):
        raise TemplateError("a message's content must be a string or a list of parts")
    for part in parts:
        if not isinstance(part, Mapping):
            raise TemplateError("a content part must be an object")
        if part.get("type") != "text":
            raise TemplateError(f"content parts of type {part.get('type')!r} are not supported")
        text = part.get("text")
        if not isinstance(text, str):
            raise TemplateError("a content part of type 'text' needs a string 'text'")
        yield text
