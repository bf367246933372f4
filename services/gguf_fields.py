"""Metadata fields of a GGUF file by name, and the error of everything that reads them."""

import json
from pathlib import Path
from typing import Any


class ConvertError(Exception):
    """The GGUF cannot be converted; the message says what in it is not supported."""


_REQUIRED = object()


def get(fields: dict[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """The value of one metadata field; without a default it must be there."""
    if name in fields:
        return fields[name].contents()
    if default is _REQUIRED:
        raise ConvertError(f"the GGUF lacks the metadata field {name}")
    return default


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
