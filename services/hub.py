"""Models of a Hugging Face hub, each at one commit, in the cache that all users of the hub share.

:func:`pin` turns a branch or tag into a commit, once, so that all processes of a deployment read
the same files. For each commit ``~/.cache/baton/hub`` has a record of the repository's files, and
of those whose hash has been checked: with it the hub is not asked a second time. huggingface_hub
downloads, and reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE; it is imported when it is
needed. What the files hold is not known here.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from services.engine.weight_files import INDEX, SINGLE, WeightFilesError, weight_names
from services.gguf_fields import ConvertError
from services.gguf_parts import model_name, part_names
from services.hub_errors import Unreachable, explained
from services.hub_id import COMMIT, HubModel
from services.model_cache import FetchError, Progress, Report, locked, silent, size, write_json
from services.model_folder import NO_TOKENIZER, check_folder

LOOK_UP_S = 10.0  # for the hub to answer what a revision is; then the cache is used
WORTH_WORDS = 1_000_000  # bytes of a download of which more is said than that it begins
RECORD_FORMAT = 1
NEEDED = ("config.json", "tokenizer.json")
WELCOME = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    num_bytes: int
    hash: str  # hex: sha256, or git's sha1 of small files; empty: unknown


@dataclass
class Record:
    """What is known of one commit. ``checked`` has size and time of each file as it was then."""

    files: dict[str, HubFile]
    checked: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gguf:
    """The GGUF model that was asked for; ``get`` downloads its file, or files, if need be."""

    name: str
    sha256: str  # of its file, or of the hashes of its files
    get: Callable[[], Path]


def pin(model: HubModel, cache: Path, report: Report) -> HubModel:
    """The model at a commit: what its branch or tag is now, or was when the hub last answered.

    Raises :class:`FetchError`.
    """
    if model.pinned:
        return model
    ref = repo_folder(model) / "refs" / model.revision
    try:
        commit, files = look_up(model)
    except Unreachable as error:
        if not ref.is_file():
            raise error.without_cache(model, hub_cache()) from error
        commit = ref.read_text().strip()
        report(f"{error}: {model.repo} as it is cached, {model.revision} was commit {commit}")
        return replace(model, revision=commit)
    report(f"{model.repo}: {model.revision} is commit {commit}")
    pinned = replace(model, revision=commit)
    path = record_path(pinned, cache)
    with locked(path, report):
        if read_record(path) is None:
            write_record(path, Record(files))
    with suppress(OSError):  # so that it is found offline; a cache may be there to be read only
        if not ref.is_file() or ref.read_text() != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            partial = ref.with_name(f"{ref.name}.{os.getpid()}.partial")
            partial.write_text(commit)
            os.replace(partial, ref)
    return pinned


def fetch_folder(model: HubModel, cache: Path, report: Report, weights: bool = True) -> Path:
    """The folder of a pinned model, complete and checked; ``weights`` may be left out.

    Raises :class:`FetchError`.
    """
    with locked(record_path(model, cache), report):
        snapshot = Snapshot(model, cache, report)
        snapshot.check_names()
        small = [name for name in (*NEEDED, *WELCOME) if name in snapshot.files]
        if weights:
            small += [INDEX] if INDEX in snapshot.files and SINGLE not in snapshot.files else []
            snapshot.bring(small)
            snapshot.bring(snapshot.weight_names())
            check_folder(snapshot.folder)
        else:
            snapshot.bring(small)
    return snapshot.folder


def find_gguf(model: HubModel, cache: Path, report: Report) -> Gguf:
    """The GGUF of a pinned model, not downloaded yet. Raises :class:`FetchError`."""

    def get() -> Path:
        with locked(path, report):
            snapshot = Snapshot(model, cache, report)
            snapshot.bring(names)
        return snapshot.folder / names[0]

    path = record_path(model, cache)
    with locked(path, report):
        snapshot = Snapshot(model, cache, report)
        names = snapshot.gguf_names()
        hashes = [snapshot.files[name].hash for name in names]
        if any(len(sha256) != 64 for sha256 in hashes):  # in git itself, or the hub does not say
            snapshot.bring(names)
            hashes = [hub_hash(snapshot.folder / name, like="0" * 64) for name in names]
    whole = hashes[0] if len(names) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return Gguf(model_name(Path(names[0])), whole, get)


class Snapshot:
    """The files of one commit: which there are, and which are here. Its user holds the lock."""

    def __init__(self, model: HubModel, cache: Path, report: Report) -> None:
        self.model, self.report = model, report
        self.folder = repo_folder(model) / "snapshots" / model.revision
        self._path = record_path(model, cache)
        self._only_cached = False
        self._record = self._known()

    @property
    def files(self) -> dict[str, HubFile]:
        """By name in the repository."""
        return self._record.files

    def _known(self) -> Record:
        """From the record, else from the hub, else what another program left in the cache."""
        if (record := read_record(self._path)) is not None:
            return record
        try:
            _, files = look_up(self.model)
        except Unreachable as error:
            if not self.folder.is_dir():
                raise error.without_cache(self.model, hub_cache()) from error
            self.report(f"{error}: {self.model.repo} as it is cached, at {self.folder}")
            self._only_cached = True
            found = (path for path in self.folder.rglob("*") if path.is_file())
            return Record(
                {str(p.relative_to(self.folder)): HubFile(p.stat().st_size, "") for p in found}
            )
        write_record(self._path, Record(files))
        return Record(files)

    def check_names(self) -> None:
        """Raise :class:`FetchError` unless there is what a model needs."""
        names, repo = self.files.keys(), self.model.repo
        weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        if "adapter_config.json" in names and "config.json" not in names:
            why = "it is an adapter (LoRA), not a model; merge it into its base model"
        elif not weights and any(name.endswith(".gguf") for name in names):
            why = f"it has GGUF files only: {self._choices()}"
        elif "config.json" not in names:
            why = "it has no config.json, so it is no model as transformers reads them"
        elif not weights:
            others = sorted(n for n in names if n.endswith((".bin", ".pth", ".pt", ".h5")))
            why = f"it has no *.safetensors{', but ' + ', '.join(others[:3]) if others else ''}"
            why += "; Baton reads safetensors and GGUF only: look for a revision that has them"
            why += ", or convert them with transformers' save_pretrained"
        elif "tokenizer.json" not in names:
            why = NO_TOKENIZER.format(
                has="only tokenizer.model" if "tokenizer.model" in names else "and no other either",
                source=repo,
            )
        else:
            return
        self._refuse(why)

    def _refuse(self, why: str) -> None:
        if self._only_cached:
            why = f"the cache has only a part of it, and the hub cannot be asked ({why})"
        raise FetchError(f"{self.model}: {why}")

    def _choices(self) -> str:
        found = sorted(name for name in self.files if name.endswith(".gguf"))
        choices = ", ".join(f"{self.model.repo}:{name}" for name in found)
        return f"choose one of {choices}" if choices else "it has none"

    def weight_names(self) -> list[str]:
        """The safetensors of the model; an index must have been brought."""
        try:
            return weight_names(self.files.keys(), lambda name: (self.folder / name).read_bytes())
        except WeightFilesError as error:
            raise FetchError(f"{self.model}: {error}") from error

    def gguf_names(self) -> list[str]:
        """The GGUF file that was asked for, by its path or by a word of its name; all its parts."""
        word = self.model.file
        files = [Path(name) for name in self.files if name.endswith(".gguf")]
        found = [path for path in files if word == str(path)]
        found = found or [path for path in files if is_called(path, word)]
        if len({path.with_name(model_name(path)) for path in found}) != 1:
            self._refuse(f"{len(found) or 'no'} GGUF files are called {word!r}: {self._choices()}")
        try:
            parts = [found[0].with_name(name) for name in part_names(found[0].name)]
        except ConvertError as error:
            raise FetchError(f"{self.model}: {error}") from error
        if missing := [path.name for path in parts if path not in files]:
            self._refuse(f"the model is split, and lacks {', '.join(missing)}")
        return [str(path) for path in parts]

    def bring(self, names: Iterable[str]) -> None:
        """Download what is not here, and check the hash of all that was not checked yet."""
        missing = [name for name in names if not self._is_here(name)]
        if not missing:
            return
        from huggingface_hub import hf_hub_download

        started, total = time.monotonic(), sum(self.files[name].num_bytes for name in missing)
        check_space(total)
        what = missing[0] if len(missing) == 1 else f"{len(missing)} files"
        self.report(f"downloading {what} of {self.model.repo} ({size(total)})")
        bar = bar_class(Progress(total, self.report if total >= WORTH_WORDS else silent))
        for name in missing:
            with explained(self.model, hub_cache(), downloading=name):
                hf_hub_download(
                    self.model.repo,
                    name,
                    revision=self.model.revision,
                    library_name="baton",
                    tqdm_class=bar,
                )
            self._check(name)
        if total >= WORTH_WORDS:
            self.report(f"downloaded in {time.monotonic() - started:.1f} s, hashes as expected")

    def _is_here(self, name: str) -> bool:
        path = self.folder / name
        if not path.is_file():
            return False
        stat = path.stat()
        if self._record.checked.get(name) != (stat.st_size, stat.st_mtime_ns):
            self._check(name)
        return True

    def _check(self, name: str) -> None:
        """Compare a file with what the hub says of it, and remember that it was."""
        path, expected = self.folder / name, self.files[name].hash
        actual = hub_hash(path, expected)
        if actual != expected:
            blob = path.resolve()
            path.unlink()
            blob.unlink(missing_ok=True)
            raise FetchError(
                f"{path} is damaged: its hash is {actual}, the hub says {expected}; it was removed,"
                " run the command again to download it"
            )
        stat = path.stat()
        self._record.checked[name] = (stat.st_size, stat.st_mtime_ns)
        if not self._only_cached:
            write_record(self._path, self._record)


# --- the hub and its cache ------------------------------------------------------------------------


def look_up(model: HubModel) -> tuple[str, dict[str, HubFile]]:
    """Commit and files of a revision; raises :class:`FetchError`, which may be Unreachable."""
    from huggingface_hub import HfApi

    with explained(model, hub_cache()):
        info = HfApi(library_name="baton").model_info(
            model.repo, revision=model.revision, files_metadata=True, timeout=LOOK_UP_S
        )
    files = {
        sibling.rfilename: HubFile(
            sibling.size or 0,
            (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or "",
        )
        for sibling in info.siblings or ()
    }
    if info.sha is None or COMMIT.fullmatch(info.sha) is None:
        raise FetchError(f"{model}: the hub does not say which commit that is; is HF_ENDPOINT one?")
    return info.sha, files


def hub_cache() -> Path:
    """Where huggingface_hub keeps repositories: below HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(model: HubModel) -> Path:
    """A repository there, laid out as huggingface_hub documents it."""
    return hub_cache() / f"models--{model.repo.replace('/', '--')}"


def hub_hash(path: Path, like: str) -> str:
    """Hash of a file, of the kind that ``like`` is: sha256, git's sha1 of a blob, or none."""
    if not like:
        return ""
    digest = hashlib.sha256()
    if len(like) == 40:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_called(path: Path, word: str) -> bool:
    """Whether ``word`` is the end of a GGUF model's name: its quantisation."""
    return re.search(rf"(^|[-.]){re.escape(word)}$", model_name(path), re.I) is not None


def check_space(num_bytes: int) -> None:
    """Raise :class:`FetchError` if so much does not fit the cache's disk."""
    folder = hub_cache()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise FetchError(
            f"{folder}: {size(num_bytes)} are to be downloaded, {size(free)} are free there"
            "; make room, or set HF_HOME to a folder on another disk"
        )


def bar_class(progress: Progress) -> Any:
    """What huggingface_hub is to use in place of tqdm, for all files of one download."""
    done = 0

    class Bar:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, num_bytes: float | None = 1) -> None:
            nonlocal done
            done += int(num_bytes or 0)  # less than nothing when a server begins again
            progress.at(done)

        def nothing(self, *_: object, **__: object) -> None:
            pass

        update_transfer = set_postfix_str = set_transfer_postfix_str = close = nothing

    return Bar


# --- records --------------------------------------------------------------------------------------


def record_path(model: HubModel, cache: Path) -> Path:
    """Where the record of a pinned model is."""
    return cache / "hub" / model.repo.replace("/", "--") / f"{model.revision}.json"


def read_record(path: Path) -> Record | None:
    """None if there is none, or one that another version wrote: it is made again."""
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != RECORD_FORMAT:
            return None
        files = {name: HubFile(**entry) for name, entry in raw["files"].items()}
        checked = {name: (entry[0], entry[1]) for name, entry in raw["checked"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return Record(files, checked)


def write_record(path: Path, record: Record) -> None:
    """Replace it at once, never in parts."""
    write_json(path, {"format": RECORD_FORMAT, **asdict(record)})
