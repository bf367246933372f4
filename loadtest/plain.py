"""Reads back what ``figures.plain_values`` has made plain: dataclasses from JSON's values.

JSON has neither nan nor infinity, both are null there. A limit that is null is infinite, and so is
the upper end of an interval whose lower end is known; any other number that is null is nan.
"""

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from loadtest.comparison import Measured
from loadtest.slo import SLO

Made = TypeVar("Made")


def from_plain(cls: type[Made], values: Any) -> Made:
    """Raises KeyError, TypeError or ValueError for values that are not of the class."""
    made: Made = _made(cls, values)
    return made


def _made(kind: Any, value: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value)
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        rest = [each for each in of if each is not type(None)]
        return None if value is None else _made(rest[0], value)
    if origin in (Mapping, dict):
        return {key: _made(of[1], item) for key, item in dict(value).items()}
    if origin is tuple:
        return tuple(_made(of[0], item) for item in value)
    if origin in (Sequence, list):
        return [_made(of[0], item) for item in value]
    if kind is float:
        return math.nan if value is None else float(value)
    if kind in (int, str, bool) and not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of {kind.__name__}")
    return value  # of a Literal too


def _object(cls: type, values: Any) -> Any:
    hints = typing.get_type_hints(cls)
    given = {field.name: _made(hints[field.name], values[field.name]) for field in fields(cls)}
    if cls is SLO:
        given = {name: math.inf if math.isnan(limit) else limit for name, limit in given.items()}
    if cls is Measured and math.isnan(given["high"]) and not math.isnan(given["low"]):
        given["high"] = math.inf
    return cls(**given)
