"""Writes deploy/requirements.txt: every package that serving needs, as it is installed here.

    python -m tests.support.image_requirements

So the image has what the tests ran with. torch's own version is written without "+cpu": which one
it is, the Dockerfile's variant says.
"""

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "requirements.txt"
OURS = "baton-serving[tracing]"
HEAD = """\
# Every package of the image, and its version: those that the tests were run with. Written by
# `make requirements`.
"""


def closure(wanted: str = OURS) -> dict[str, str]:
    """Name and version of all that ``wanted`` needs, itself left out."""
    found: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    todo = [(Requirement(wanted), frozenset({""}))]
    while todo:
        requirement, extras = todo.pop()
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker is not None and not any(marker.evaluate({"extra": e}) for e in extras):
            continue
        own = frozenset(requirement.extras or {""})
        if (name, own) in done:
            continue
        done.add((name, own))
        there = distribution(name)
        found[name] = there.version.partition("+")[0]
        todo += [(Requirement(line), own) for line in there.requires or []]
    del found[canonicalize_name(Requirement(wanted).name)]
    return found


def text(packages: dict[str, str]) -> str:
    """The file."""
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


if __name__ == "__main__":
    FILE.write_text(text(closure()))
