"""GGUF files in parts, cut short, damaged, of other kinds: read right, or refused in words."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from services import gguf_convert
from services.gguf_convert import ConvertError, convert
from services.gguf_file import read_file, read_model
from services.gguf_parts import model_name, model_parts, model_sha256
from tests.data import tiny_gguf as tiny

COMPLETE = "is not a complete GGUF file"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good file."""
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    tiny.write(path, tiny.random_weights(seed=1), quantized=frozenset({"blk.0.ffn_up.weight"}))
    return path


def split(path: Path, num_tensors: int) -> list[Path]:
    """Write the tiny model in parts, by the package's own writer; returns their paths."""
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=num_tensors)
    model = read_file(path)
    add: dict[type, Callable[..., None]] = {bool: writer.add_bool, int: writer.add_uint32}
    add |= {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in model.fields.items():
        if name != "general.architecture":
            add[type(value)](name, value)
    for tensor in model.tensors:
        data = tensor.rows if len(tensor.shape) > 1 else tensor.rows[0]
        writer.add_tensor(tensor.name, np.asarray(data), raw_dtype=tensor.kind)
    writer.write_header_to_file(path.with_name("parts.gguf"))
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob("parts-*.gguf"))


# --- the reader -----------------------------------------------------------------------------------


def test_fields_and_tensors_are_those_the_package_reads(whole: Path) -> None:
    theirs, ours = gguf.GGUFReader(whole), read_file(whole)
    fields = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    assert ours.fields == fields
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.shape == tuple(reversed(other.shape.tolist()))
        expected = gguf.dequantize(other.data, other.tensor_type)
        np.testing.assert_array_equal(mine.read().reshape(mine.shape), expected)


def test_every_type_of_field_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    values: dict[str, Any] = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4 << 29,
        "int32": -(1 << 31), "uint64": 1 << 63, "int64": -(1 << 63), "float32": 0.5,
        "float64": 0.1, "bool": True, "string": "é\U0001f600",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    lists: dict[str, Any] = {"texts": ["", "a"], "numbers": [1, -2], "reals": [0.5, 2.0]}
    lists["flags"] = [True, False]
    for name, value in lists.items():
        writer.add_array(f"x.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = read_file(tmp_path / "all.gguf").fields
    assert fields == {"general.architecture": "llama"} | {
        f"x.{name}": value for name, value in (values | lists).items()
    }


# --- damage ---------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_named(whole: Path, tmp_path: Path, full: bool) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    lengths = [*range(0, len(data), 1009 if not full else 61), len(data) - 1]
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(ConvertError, match=rf"cut\.gguf {COMPLETE}"):
            read_model(path)


def test_any_damage_to_the_head_is_refused_or_harmless(
    whole: Path, tmp_path: Path, full: bool
) -> None:
    """No other error than ConvertError, whatever byte is wrong; a file that is taken is complete.

    A changed letter of a token, say, cannot be noticed.
    """
    data = bytearray(whole.read_bytes())
    head = len(data) - sum(tensor.rows.nbytes for tensor in read_file(whole).tensors)
    chance = random.Random(5)
    path, names = tmp_path / "damaged.gguf", set(load_of(whole, tmp_path))
    said: list[str] = []
    for at in chance.sample(range(head), 3000 if full else 150):
        wrong = bytearray(data)
        wrong[at] ^= 1 << chance.randrange(8)
        path.write_bytes(wrong)
        try:
            found = load_of(path, tmp_path)
        except ConvertError as error:
            said.append(str(error))
        else:
            assert set(found) == names
    assert len(said) > 10
    assert max(map(len, said)) < 2000


def load_of(path: Path, folder: Path) -> dict[str, Any]:
    """The tensors that a GGUF is converted into."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    convert(path, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("at", "code", "value", "reason"),
    [
        (0, "4s", b"GGML", "does not begin with 'GGUF'"),
        (4, "I", 1, "of version 1; supported: little-endian 2 and 3"),
        (4, "I", 3 << 24, "big-endian"),
        (8, "Q", 1 << 60, "has 0 dimensions"),  # tensors: the first that is none
        (16, "Q", 1 << 60, "ends after|no metadata type"),  # fields: tensors read as such
        (24, "Q", 1 << 63, "ends after"),  # the length of the first field's name
    ],
)
def test_a_wrong_head_is_named(
    whole: Path, tmp_path: Path, at: int, code: str, value: Any, reason: str
) -> None:
    data = bytearray(whole.read_bytes())
    struct.pack_into("<" + code, data, at, value)
    (tmp_path / "wrong.gguf").write_bytes(data)
    with pytest.raises(ConvertError, match=rf"wrong\.gguf {COMPLETE}: .*({reason})"):
        read_model(tmp_path / "wrong.gguf")


@pytest.mark.parametrize(
    ("number", "reason"), [(31, "Q4_0_4_4; supported: F32, F16"), (77, "number 77; supported: F32")]
)
def test_a_quantisation_that_is_not_known_is_named(
    whole: Path, tmp_path: Path, number: int, reason: str
) -> None:
    name = b"blk.0.ffn_up.weight"
    data = bytearray(whole.read_bytes())
    struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 2 * 8, number)
    (tmp_path / "new.gguf").write_bytes(data)
    with pytest.raises(ConvertError, match=rf"'{name.decode()}' has the unsupported .* {reason}"):
        read_model(tmp_path / "new.gguf")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokens has a value of another type: \[1, 2\]"),
        ({"tokenizer.ggml.merges": "h e"}, "merges has a value of another type"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id has a value of another type"),
        ({"tokenizer.chat_template": 5}, "chat_template has a value of another type"),
        ({"llama.block_count": 0}, "block_count is 0, not a whole number from 1 on"),
        ({"llama.block_count": 1 << 31}, "20 tensors for 2147483648 layers"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan, not a number"),
        ({"tokenizer.ggml.tokens": tiny.TOKENS[:-1], "tokenizer.ggml.token_type": None},
         f"has {len(tiny.TOKENS) - 1} tokens, but embeds {len(tiny.TOKENS)}|do not fit"),
    ],
)  # fmt: skip
def test_fields_of_another_type_are_named(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    tiny.write(tmp_path / "tiny.gguf", tiny.random_weights(seed=1), change=change)
    with pytest.raises(ConvertError, match=reason):
        convert(tmp_path / "tiny.gguf", tmp_path)


# --- parts ----------------------------------------------------------------------------------------


def test_a_split_model_is_read_from_any_of_its_files(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, num_tensors=7)
    assert [p.name for p in parts] == [f"parts-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    expected = load_of(whole, tmp_path / "whole")
    for part in parts:
        assert model_parts(part) == parts
        found = load_of(part, tmp_path / part.stem)
        assert set(found) == set(expected)
        assert all((found[name] == value).all() for name, value in expected.items())
        assert model_name(part) == "parts"
    digests = {model_sha256(part) for part in parts}
    assert len(digests) == 1
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"\x01")
    assert model_sha256(parts[0]) not in digests


def test_parts_that_do_not_belong_together_are_named(whole: Path, tmp_path: Path) -> None:
    parts = [tmp_path / part.name for part in split(whole, num_tensors=7)]
    for part in parts:
        part.write_bytes((whole.parent / part.name).read_bytes())
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0].read_bytes())
    with pytest.raises(ConvertError, match=r"alone\.gguf says that it is number 0 .* of 3 files"):
        read_model(alone)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ConvertError, match="00003-of-00003.gguf says that it is number 1"):
        read_model(parts[0])
    parts[1].unlink()
    with pytest.raises(ConvertError, match=r"3 files, of which .* lacks parts-00002-of-00003\.gg"):
        read_model(parts[0])


# --- long conversions -----------------------------------------------------------------------------


def test_progress_is_reported(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "REPORT_SECONDS", -1.0)
    monkeypatch.setattr(gguf_convert, "CHUNK", 64 * 10)
    said: list[str] = []
    convert(whole, tmp_path, said.append)
    assert len(said) > 20
    assert said[-1].endswith("(100 %)")


def test_a_full_disk_is_noticed_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(gguf_convert.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ConvertError, match=r"weights need 0\.0 GB, .* has 0\.0 GB"):
        convert(whole, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_memory_holds_little_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 MB of float32 in each of six matrices, of which 64 KiB are decoded at a time."""
    monkeypatch.setattr(gguf_convert, "CHUNK", 1 << 14)
    monkeypatch.setattr(tiny, "MLP", 3 << 14)
    weights = tiny.random_weights(seed=1)
    tiny.write(tmp_path / "tiny.gguf", weights, change={"llama.feed_forward_length": tiny.MLP})
    tracemalloc.start()
    convert(tmp_path / "tiny.gguf", tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "model.safetensors").stat().st_size > 72e6
    assert peak < 4e6
