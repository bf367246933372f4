"""Metadata fields of a GGUF file by name, and the error of everything that reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]
"""Plain values: numbers, booleans, strings, and lists of these."""


class ConvertError(Exception):
    """The GGUF cannot be converted; the message says what in it is not supported."""


_REQUIRED: Any = object()
_LISTS: dict[str, type] = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.scores": float,
}
_TEXTS = (
    "general.architecture",
    "general.type",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
    ".rope.scaling.type",
)


def get(fields: Fields, name: str, default: Any = _REQUIRED) -> Any:
    """The value of one metadata field; without a default it must be there."""
    value = fields.get(name, default)
    if value is _REQUIRED:
        raise ConvertError(f"the GGUF lacks the metadata field {name}")
    if name in fields and not _fits(name, value):
        raise ConvertError(f"the metadata field {name} has a value of another type: {value!r:.80}")
    return value


def _fits(name: str, value: Any) -> bool:
    """Whether a value has the type that a field of this name has."""
    if name in _LISTS:
        return isinstance(value, list) and all(type(item) is _LISTS[name] for item in value)
    if name.endswith("_token_id"):
        return type(value) is int and value >= 0
    return isinstance(value, str) or not name.endswith(_TEXTS)


def count(fields: Fields, name: str, default: int = _REQUIRED) -> int:
    """A whole number from 1 on. A list that has one for each layer must hold the same one."""
    value = get(fields, name, default)
    if isinstance(value, list) and value:
        if any(item != value[0] for item in value):
            raise ConvertError(f"{name} differs by layer, which is not supported")
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConvertError(f"the metadata field {name} is {value!r}, not a whole number from 1 on")
    return value


def number(fields: Fields, name: str, default: float = _REQUIRED) -> float:
    """A finite number."""
    value = get(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value - value != 0:
        raise ConvertError(f"the metadata field {name} is {value!r}, not a number")
    return float(value)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
