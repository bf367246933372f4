"""Scenarios as people write them: YAML files, those that are built in, and single flags.

Every error is a ValueError that names the key, the value and what is allowed. Knows nothing of what
is made of a scenario.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from loadtest.arrivals import Arrivals, parse_arrivals
from loadtest.lengths import parse_lengths, positional
from loadtest.scenario import ClassSpec, Scenario, Think
from loadtest.slo import SLO, parse_slo


def load_scenario(name_or_path: str | Path) -> Scenario:
    """One that is built in, by its name, or a YAML file.

    Raises ValueError that says what is wrong, also for a file that is not there.
    """
    if str(name_or_path) in builtin_scenarios():
        text = (_folder() / f"{name_or_path}.yaml").read_text(encoding="utf-8")
        return from_yaml(text, f"scenario {name_or_path}")
    path = Path(name_or_path)
    try:
        return from_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(
            f"scenario {str(name_or_path)!r}: {error.strerror}; built in are"
            f" {', '.join(builtin_scenarios())}"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def builtin_scenarios() -> tuple[str, ...]:
    """Names of those that are shipped."""
    names = [entry.name for entry in _folder().iterdir()]
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def _folder() -> Traversable:
    return resources.files("loadtest") / "scenarios"


def from_yaml(text: str, where: str = "scenario") -> Scenario:
    """Read a scenario file; errors begin with ``where``."""
    try:
        keys = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    parsers = {"name": _name, "about": _text, "arrivals": _arrivals, "classes": _classes}
    values = _read(keys, parsers, ("name", "classes"), where)
    try:
        return Scenario(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def to_yaml(scenario: Scenario) -> str:
    """A file that `from_yaml` reads back; keys that have their default are left out."""
    keys = {
        "name": scenario.name,
        "about": scenario.about,
        "arrivals": str(scenario.arrivals),
        "classes": [_written(spec) for spec in scenario.classes],
    }
    keys = {key: value for key, value in keys.items() if value}
    return yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=100)


def single(name: str = "requests", arrivals: str = "poisson", **keys: Any) -> Scenario:
    """One class, from the keys of `ClassSpec` as a file would have them.

    ``single(input="128", output="64", turns="3", slo="ttft=500ms")``. Errors begin with the key,
    which is that of the flag.
    """
    keys = {"name": name, **{key: value for key, value in keys.items() if value is not None}}
    common = _read({"arrivals": arrivals}, {"arrivals": _arrivals}, (), "")
    return Scenario(name, (_class(keys, ""),), **common)


# --- mappings ------------------------------------------------------------------------------------

Parse = Callable[[Any], Any]


def _read(
    keys: Any, parsers: Mapping[str, Parse], needed: Iterable[str], where: str
) -> dict[str, Any]:
    """The values of a mapping's keys, each by its parser."""
    if not isinstance(keys, dict):
        raise ValueError(_at(where, f"{keys!r} is not a mapping of {', '.join(parsers)}"))
    values = {}
    for key, value in keys.items():
        if key not in parsers:
            close = difflib.get_close_matches(str(key), parsers, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(parsers)}"
            raise ValueError(_at(where, f"no key {key!r}; {hint}"))
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            raise ValueError(_at(where, f"{key}: {error}")) from None
    for key in needed:
        if key not in values:
            raise ValueError(_at(where, f"the key {key!r} is missing"))
    return values


def _at(where: str, message: str) -> str:
    return f"{where}: {message}" if where else message


def _classes(value: Any) -> tuple[ClassSpec, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of classes, '- name: ...' each")
    return tuple(_class(keys, f"class {number}") for number, keys in enumerate(value, 1))


def _class(keys: Any, where: str) -> ClassSpec:
    if where and isinstance(keys, dict) and "name" in keys:
        where = f"class {keys['name']}"
    needed = [entry.name for entry in fields(ClassSpec) if entry.default is MISSING]
    return ClassSpec(**_read(keys, _CLASS_KEYS, needed, where))


def _written(spec: ClassSpec) -> dict[str, str | int | float]:
    """A class as keys of YAML."""
    keys: dict[str, str | int | float] = {}
    for entry in fields(spec):
        value = getattr(spec, entry.name)
        if value == entry.default:
            continue
        if isinstance(value, SLO):
            limits = [(limit.name, getattr(value, limit.name)) for limit in fields(value)]
            value = ",".join(f"{k}={positional(v)}s" for k, v in limits if math.isfinite(v))
        elif isinstance(value, Think):
            value = ("exponential:" if value.varies else "") + positional(value.mean_s)
        text = value if isinstance(value, int | float) else str(value)
        keys[entry.name] = int(text) if isinstance(text, str) and text.isdigit() else text
    return keys


# --- values --------------------------------------------------------------------------------------


def parse_think(text: str) -> Think:
    """Read ``2`` (always so many seconds) or ``exponential:2`` (on average)."""
    match = re.fullmatch(r"(exponential:)?(\d{1,6}(?:\.\d+)?)", text.strip())
    if match is None:
        raise ValueError(f"think time {text!r}: want SECONDS or exponential:SECONDS")
    return Think(float(match[2]), bool(match[1]))


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,64}", value):
        raise ValueError(f"{value!r}: want a name of letters, digits and . _ -")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value.strip()


def _from_text(parse: Callable[[str], Any]) -> Parse:
    """For values that are written as a word or as a number."""

    def checked(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{value!r} is neither a text nor a number")
        return parse(str(value))

    return checked


def _whole(low: int) -> Parse:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < low:
            raise ValueError(f"{text!r}: want a whole number from {low} up")
        return int(text)

    return _from_text(parse)


def _number(low: float, above: bool) -> Parse:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (low < number < math.inf or (number == low and not above)):
            raise ValueError(f"{text!r}: want a number {'above' if above else 'from'} {low:g}")
        return number

    return _from_text(parse)


def _slo(value: Any) -> SLO:
    """Text, or a mapping of the same: ``{ttft: 500ms}``."""
    if isinstance(value, dict):
        value = ",".join(f"{name}={limit}" for name, limit in value.items())
    slo: SLO = _from_text(parse_slo)(value)
    return slo


_arrivals: Callable[[Any], Arrivals] = _from_text(parse_arrivals)

_CLASS_KEYS: dict[str, Parse] = {
    "name": _name,
    "input": _from_text(parse_lengths),
    "output": _from_text(parse_lengths),
    "share": _number(0, above=True),
    "arrivals": _arrivals,
    "prefix": _whole(0),
    "prefixes": _whole(1),
    "popularity": _number(0, above=False),
    "turns": _from_text(parse_lengths),
    "turn_input": _from_text(parse_lengths),
    "think": _from_text(parse_think),
    "slo": _slo,
}
