"""Which files one GGUF model consists of: a large one may be split into NAME-00001-of-00003.gguf …

Looks at names only (:mod:`services.gguf_file` compares what the files say), so that the command
can hash a model's files without what is needed to read them.
"""

import hashlib
import re
from pathlib import Path

from services.gguf_fields import ConvertError

PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_name(path: Path) -> str:
    """What the file's name calls the model: without its number, whichever part it is."""
    part = PART.fullmatch(path.name)
    return part["name"] if part else path.stem


def part_names(name: str) -> list[str]:
    """Names of the files of the model that a file ``name`` is a part of, in order."""
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    total = int(part["count"])
    names = [f"{part['name']}-{i:05}-of-{total:05}.gguf" for i in range(1, total + 1)]
    if name not in names:
        raise ConvertError(f"{name} is no part of a model in {total} files")
    return names


def model_parts(path: Path) -> list[Path]:
    """The files of the model that ``path`` is a part of, in order; raises :class:`ConvertError`."""
    paths = [path.with_name(name) for name in part_names(path.name)]
    if len(paths) > 1 and (missing := [p.name for p in paths if not p.is_file()]):
        raise ConvertError(
            f"the model is split into {len(paths)} files, of which {path.parent} lacks "
            f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
        )
    return paths


def model_sha256(path: Path) -> str:
    """Hex sha256 of a model's file, or of its files one after the other."""
    digest = hashlib.sha256()
    for part in model_parts(path):
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
