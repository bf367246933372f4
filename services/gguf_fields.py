"""Metadata fields of a GGUF file by name, and the error of everything that reads them."""

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
