"""Names of models on a Hugging Face hub (pure).

::

    org/name[@revision]            safetensors, as transformers reads them
    org/name:file.gguf[@revision]  a GGUF file in the repository; org/name/file.gguf is the same
    org/name:Q4_K_M[@revision]     the one GGUF file whose name ends so

A revision is a branch, a tag or a commit. Built-in names and paths come first: see
:mod:`services.fetch`.
"""

import re
from dataclasses import dataclass

COMMIT = re.compile("[0-9a-f]{40}")
_PART = r"(?![.-])[\w.-]+"
_ID = re.compile(rf"({_PART}/{_PART})(?:([:/])([^:@]+))?(?:@([^:@]+))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """What a user asks for."""

    repo: str
    file: str = ""  # a GGUF file, or a word of its name; empty: safetensors
    revision: str = "main"

    @property
    def name(self) -> str:
        """As clients call it: without the revision."""
        return f"{self.repo}:{self.file}" if self.file else self.repo

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit."""
        return COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def parse(model: str) -> HubModel | None:
    """What ``model`` means as a hub id; None if it is none."""
    match = _ID.fullmatch(model)
    if match is None:
        return None
    repo, mark, file, revision = match.groups(default="")
    if repo.endswith(".gguf") or (mark == "/" and not file.endswith(".gguf")):
        return None  # a path of which nothing is there
    return HubModel(repo, file, revision or "main")
