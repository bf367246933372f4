"""Which files of a model are its weights: one rule for folders, for hubs, and for who reads them.

The rule is that of ``transformers``, so that a copy of the weights in another format, which many
repositories hold beside them, is not mistaken for a part of them. Knows names only, no torch.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFilesError(ValueError):
    """The weights cannot be told, or are not complete; the message says which file is at fault."""


def weight_names(names: Collection[str], read: Callable[[str], bytes]) -> list[str]:
    """The safetensors files of a model that has files of these ``names``, in a fixed order.

    That is ``model.safetensors``, else the shards that the index names, else all that there are,
    which may be none. ``read`` gives a file's content. Raises :class:`WeightFilesError`.
    """
    if SINGLE in names:
        return [SINGLE]
    if INDEX not in names:
        return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    try:
        shards = sorted(set(json.loads(read(INDEX))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFilesError(f"{INDEX} is damaged: {error}") from error
    for name in shards:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise WeightFilesError(f"{INDEX} is damaged: it names {name!r}")
        if name not in names:
            raise WeightFilesError(f"{name} is missing, although {INDEX} names it")
    return shards


def weight_files(folder: Path) -> list[Path]:
    """The same for a folder. Raises :class:`WeightFilesError` and OSError."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return [folder / n for n in weight_names(names, lambda name: (folder / name).read_bytes())]
