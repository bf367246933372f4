"""What a model's folder holds: whether it is whole, and what names its weights.

Folders that Baton converted have a baton.json with each file's hash; others are as Hugging Face
lays them out. Knows files, neither tensors nor where the folder comes from.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from services.engine.weight_files import WeightFilesError, weight_files
from services.model_cache import FetchError, check_sha256, file_sha256

MANIFEST = "baton.json"
MANIFEST_FORMAT = 1
SAMPLES, SAMPLE_BYTES = 64, 4096  # what weights_id reads of each safetensors file
NO_TOKENIZER = (
    "it has no tokenizer.json ({has}); transformers writes one: AutoTokenizer.from_pretrained("
    "{source!r}).save_pretrained(FOLDER), then put it beside the weights, and give that folder"
)


def write_manifest(folder: Path, source: str, sha256: str) -> None:
    """Record in baton.json what the folder was made from and what is in it."""
    files = {
        path.name: {
            "sha256": file_sha256(path),
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
        }
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": MANIFEST_FORMAT, "source": source, "weights": sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What baton.json says."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] == MANIFEST_FORMAT and isinstance(manifest["weights"], str):
            return dict(manifest)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise FetchError(f"{path} is missing or damaged; delete {folder} and retry") from error
    raise FetchError(f"{path} is of another version of baton; delete {folder} and retry")


def check_converted(folder: Path) -> None:
    """Raise :class:`FetchError` unless each file is the one that was written.

    Hashing half a gigabyte takes a second: a file whose size and time are as recorded is believed.
    """
    for name, entry in read_manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file():
            raise FetchError(f"{path} is missing; delete {folder} and run `baton fetch` again")
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (entry["bytes"], entry["mtime_ns"]):
            check_sha256(path, entry["sha256"], f"delete {folder} and run `baton fetch` again")


def check_folder(folder: Path) -> None:
    """Raise :class:`FetchError` unless the folder holds a whole model."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing == ["tokenizer.json"] and (folder / "tokenizer.model").is_file():
        why = NO_TOKENIZER.format(has="only tokenizer.model", source=str(folder))
        raise FetchError(f"{folder}: {why}")
    if missing:
        raise FetchError(f"{folder} is not a model folder: it lacks {', '.join(missing)}")
    if (folder / MANIFEST).exists():
        check_converted(folder)
    for path in weights_of(folder):
        safetensors_header(path)


def weights_of(folder: Path) -> list[Path]:
    """The weight files that belong to the model, in a fixed order."""
    try:
        return weight_files(folder)
    except WeightFilesError as error:
        raise FetchError(f"{folder}: {error}") from error


def safetensors_header(path: Path) -> bytes:
    """The JSON head of a safetensors file; raises :class:`FetchError` when it is cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size else b""
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        end = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{path} is not a safetensors file, or it is damaged") from error
    if end != size:
        raise FetchError(f"{path} is not complete: {size} bytes, its header says {end}")
    return header


def weights_id(folder: Path) -> str:
    """What names the weights: equal on every machine, different for other weights of equal shape.

    A converted folder has its GGUF's sha256. For others, hashing all of a large model would take
    minutes, so config, headers, sizes and samples spread over each file are hashed.
    """
    if (folder / MANIFEST).exists():
        return str(read_manifest(folder)["weights"])
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights_of(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode() + safetensors_header(path))
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1) if size > SAMPLE_BYTES else 0)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
