"""Reads Dockerfiles and .dockerignore files, as far as ours go, since no engine may be at hand."""

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """From one FROM to the next: its instructions, and what it stands on."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest of it

    def all(self, *instructions: str) -> list[str]:
        return [rest for instruction, rest in self.steps if instruction in instructions]

    @property
    def environment(self) -> dict[str, str]:
        """What ENV sets here."""
        words = [word for rest in self.all("ENV") for word in shlex.split(rest)]
        return dict(word.split("=", 1) for word in words)

    @property
    def copies(self) -> list[tuple[str, list[str], str]]:
        """Of each COPY: the stage it is from, or "" for the context; sources; target."""
        found = []
        for rest in self.all("COPY", "ADD"):
            words = shlex.split(rest)
            flags = [word for word in words if word.startswith("--")]
            paths = [word for word in words if not word.startswith("--")]
            origin = next((f.split("=", 1)[1] for f in flags if f.startswith("--from=")), "")
            found.append((origin, paths[:-1], paths[-1]))
        return found

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command that RUN, ENTRYPOINT and CMD start, without the shell's own."""
        found = [json.loads(rest) for rest in self.all("ENTRYPOINT", "CMD")]
        return found + [words for rest in self.all("RUN") for words in shell_commands(rest)]


@dataclass
class Dockerfile:
    """Stages, and arguments that stand before the first."""

    arguments: dict[str, str]
    stages: list[Stage]

    def chain(self, variant: str = "cpu") -> list[Stage]:
        """The last stage and all that it stands on or copies from, for one VARIANT."""
        names = {stage.name: stage for stage in self.stages if stage.name}
        found: list[Stage] = []
        todo = [self.stages[-1]]
        while todo:
            stage = todo.pop()
            if stage in found:
                continue
            found.append(stage)
            bases = [stage.base, *(origin for origin, _, _ in stage.copies)]
            bases = [base.replace("${VARIANT}", variant) for base in bases]
            todo += [names[base] for base in bases if base in names]
        return found


def read_dockerfile(path: Path) -> Dockerfile:
    """Refuses what it does not know."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    parsed = Dockerfile({}, [])
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        instruction, _, rest = line.strip().partition(" ")
        rest = " ".join(rest.split()) if instruction != "RUN" else rest.strip()
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            parsed.stages.append(Stage(base, name))
        elif parsed.stages:
            parsed.stages[-1].steps.append((instruction, rest))
        else:
            assert instruction == "ARG", line
            name, _, default = rest.partition("=")
            parsed.arguments[name] = default
    return parsed


def shell_commands(text: str) -> list[list[str]]:
    """Each simple command of a shell line, those of ``$(...)`` as well."""
    outer, inner = substitutions(text)
    found = [command for part in inner for command in shell_commands(part)]
    for words in split_shell(outer):
        while words and (words[0] in ("if", "then", "else") or re.match(r"\w+=", words[0])):
            words = words[1:]
        if words and words[0] not in ("fi", "["):
            found.append(words)
    return found


def substitutions(text: str) -> tuple[str, list[str]]:
    """``text`` with a word in the place of each outermost ``$(...)``, and what is in these."""
    outer, inner = "", []
    while (start := text.find("$(")) >= 0:
        end, depth = start + 2, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        outer += text[:start] + "SUBSTITUTED"
        inner.append(text[start + 2 : end - 1])
        text = text[end:]
    return outer + text, inner


def split_shell(text: str) -> list[list[str]]:
    """Words between ``&&``, ``|``, ``;`` and redirections' targets left in."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&|;"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


def in_context(root: Path) -> list[Path]:
    """The files that `docker build` is sent: .dockerignore's last matching line decides."""
    patterns = [
        line for line in (root / ".dockerignore").read_text().split("\n") if line and line[0] != "#"
    ]
    sent: list[Path] = []
    todo = [path for path in root.iterdir() if path.name != ".git"]
    while todo:
        path = todo.pop()
        name = path.relative_to(root).as_posix()
        if path.is_dir():  # a folder that is left out may hold what is not
            if not is_ignored(name, patterns) or any(
                p[1:].startswith(name + "/") for p in patterns
            ):
                todo += path.iterdir()
        elif not is_ignored(name, patterns):
            sent.append(path)
    return sorted(sent)


def is_ignored(name: str, patterns: list[str]) -> bool:
    """A pattern matches a path and what is below it; ``**/`` any folders, also none."""
    ignored = False
    for pattern in patterns:
        negated, text = pattern.startswith("!"), pattern.removeprefix("!").rstrip("/")
        parts = name.split("/")
        above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if any(_matches(path, text) for path in above):
            ignored = not negated
    return ignored


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(path.rsplit("/", 1)[-1], pattern.removeprefix("**/"))
    if path.count("/") != pattern.count("/"):  # here * matches no slash
        return False
    return fnmatch.fnmatchcase(path, pattern)
