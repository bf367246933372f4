"""``values.yaml`` as a tree of values, each with its default and with what its comment says (pure).

A value's comment is what stands above its key, without a blank line between, and what stands behind
it in its line. A line of dashes divides the file and belongs to no value. YAML libraries drop
comments, so their places come from the marks of the parsed nodes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml


class ValuesError(ValueError):
    """values.yaml and rules.py do not go together; the message says at which key."""


@dataclass(frozen=True)
class Value:
    """A key of values.yaml; the root is the file as a whole."""

    path: tuple[str, ...]
    default: Any
    note: str = ""
    children: tuple["Value", ...] = ()  # of a mapping that is not empty

    @property
    def name(self) -> str:
        """As users write it: ``prefill.shm.size``."""
        return ".".join(self.path)

    def leaves(self) -> Iterator["Value"]:
        """All values below that are no mappings of more, in the order of the file."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()

    def child(self, key: str) -> "Value | None":
        """The value of a key of this mapping."""
        return next((each for each in self.children if each.path[-1] == key), None)


def read_values(text: str) -> Value:
    """The root of a values.yaml."""
    node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    if not isinstance(node, yaml.MappingNode):
        raise ValuesError("values.yaml is not a mapping")
    return Value((), values, "", tuple(_children(node, values, (), text.splitlines())))


def _children(
    node: yaml.MappingNode, values: dict[str, Any], path: tuple[str, ...], lines: list[str]
) -> Iterator[Value]:
    for (key, value), (name, default) in zip(node.value, values.items(), strict=True):
        here, nested = (*path, name), isinstance(value, yaml.MappingNode)
        children = tuple(_children(value, default, here, lines)) if nested else ()
        yield Value(here, default, _note(key, value, lines), children)


def _note(key: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    above: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        comment = re.fullmatch(rf" {{{key.start_mark.column}}}# ?(.*)", line)
        if not comment or re.match(r"[-=]{3}", comment[1]):
            break
        above.insert(0, comment[1].strip().removeprefix("-- "))
    block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    end = key.end_mark if block else value.end_mark
    behind = re.search(r"(?:^|\s)#\s*(.*)", lines[end.line][end.column :])
    return " ".join(part for part in [*above, behind[1].strip() if behind else ""] if part)
