"""Dataclasses as msgpack maps, and the frames that carry them (pure).

Knows no message by name: ``router.wire`` says which there are. A frame is a u32 big-endian length
and a map ``{"t": class name, **fields}``. Unknown keys are ignored, and fields with their default
values are left out: such fields can be added, and cost nothing where they say nothing. Types are
checked; nothing is pickled.

A frame of a connection also has ``"n"``, its number in its direction, counted from 1, and as its
last key ``"c"``, the CRC-32 of everything before that value. So the receiver notices a frame that
was lost, doubled, overtaken or changed on the way, whatever carried it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Generic, TypeVar
from zlib import crc32

import msgpack

LENGTH_BYTES = 4
_CRC_BYTES = 4

Message = TypeVar("Message")

_SCALARS: dict[str, type | tuple[type, ...]] = {
    "int": int, "str": str, "bytes": bytes, "bool": bool, "float": (float, int),
}  # fmt: skip


class WireError(Exception):
    """A frame that cannot be understood; the connection that carried it is closed."""


class Codec(Generic[Message]):
    """Encodes and decodes ``messages``; their fields may hold dataclasses of ``parts``."""

    def __init__(
        self, messages: Iterable[type[Any]], parts: Iterable[type[Any]], version: int
    ) -> None:
        self._messages = {cls.__name__: cls for cls in messages}
        self._parts = {cls.__name__: cls for cls in parts}
        self._version = version
        classes = (*self._messages.values(), *self._parts.values())
        self._schemas = {cls: _schema(cls) for cls in classes}
        self._optional = {cls: _optional(cls) for cls in classes}

    def encode(self, message: Message, number: int | None = None) -> bytes:
        """One frame, length included; with a number and a checksum when a number is given."""
        cls = type(message)
        raw = {"t": cls.__name__, **vars(message)}
        for name, default in self._optional[cls]:
            if raw[name] == default:  # as whoever reads it will fill in
                del raw[name]
        if number is not None:
            raw |= {"n": number, "c": bytes(_CRC_BYTES)}
        body: bytes = msgpack.packb(raw, default=vars)
        if number is not None:
            body = body[:-_CRC_BYTES] + _checksum(body)
        return len(body).to_bytes(LENGTH_BYTES, "big") + body

    def decode(self, body: bytes) -> Message:
        """The message in a frame's body; raises :class:`WireError` for anything that is not one."""
        return self.unpack(body)[0]

    def unpack(self, body: bytes) -> tuple[Message, int | None]:
        """The message and its number; None when it has none, or no checksum to vouch for it."""
        try:
            raw = msgpack.unpackb(body)
            cls = self._messages[raw.pop("t")]
            number, checksum = raw.get("n"), raw.get("c")
            if checksum is not None and checksum != _checksum(body):
                raise ValueError("the checksum differs")
            message: Message = self.build(cls, raw)
        except (
            KeyError, TypeError, ValueError, AttributeError, RecursionError,
            msgpack.UnpackException,
        ) as error:  # fmt: skip
            raise WireError(
                f"not a message of protocol version {self._version}: {error!r}"
            ) from error
        return message, number if checksum is not None else None

    def build(self, cls: type[Any], raw: Mapping[str, Any]) -> Any:
        """A dataclass from plain data: unknown keys are ignored, lists become tuples."""
        values = {}
        for name, kind, required in self._schemas[cls]:
            if name in raw:
                values[name] = self._convert(kind, raw[name])
            elif required:
                raise KeyError(f"{cls.__name__}.{name} is missing")
        return cls(**values)

    def _convert(self, kind: str, value: Any) -> Any:
        if kind in _SCALARS:
            if not isinstance(value, _SCALARS[kind]) or (kind == "int" and isinstance(value, bool)):
                raise TypeError(f"{value!r:.80} is not {kind}")
            return value
        if kind in self._parts:
            return self.build(self._parts[kind], value)
        if kind.startswith("tuple["):
            return tuple([self._convert(kind[6:-6], item) for item in value])
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.80} is not a map")
        return value


def _checksum(body: bytes) -> bytes:
    """Of a body whose last bytes are the checksum, or room for it."""
    return crc32(memoryview(body)[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "big")


def _optional(cls: type[Any]) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field that may be left out."""
    return tuple((item.name, item.default) for item in fields(cls) if item.default is not MISSING)


def _schema(cls: type[Any]) -> tuple[tuple[str, str, bool], ...]:
    """(name, type as text, required) of each field."""
    return tuple(
        (
            item.name,
            item.type if isinstance(item.type, str) else item.type.__name__,
            item.default is MISSING and item.default_factory is MISSING,
        )
        for item in fields(cls)
    )
