"""Reads GGUF files: the metadata, and where the tensors lie in them.

The ``gguf`` package has a reader, too. It wraps every string of a vocabulary in an array (seconds
and hundreds of megabytes), and believes each length that it reads, so that a file cut short is
accepted and a damaged one keeps it busy for ever. This one checks that all it names is inside the
file. Knows no architecture.
"""

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from services.gguf_fields import ConvertError, count
from services.gguf_parts import model_parts

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 had shorter lengths, in 2023
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
SCALARS[12] = "d"
"""GGUF's types of metadata values, as :mod:`struct` names them."""
MAX_DIMENSIONS = 4
REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
"""Quantisations that llama.cpp once had."""


@dataclass(frozen=True)
class Tensor:
    """One tensor, still in its file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # the slowest axis first, as everywhere but in GGUF: [out, in]
    rows: NDArray[np.uint8]  # [product of all but the last axis, bytes of a row], mapped

    def read(self, first: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Rows as float32, ``[num_rows, shape[-1]]``."""
        with np.errstate(all="ignore"):  # damaged scales; whoever reads looks at the values
            values = gguf.dequantize(np.asarray(self.rows[first:end]), self.kind)
        return np.asarray(values, dtype=np.float32)


@dataclass(frozen=True)
class GgufModel:
    """The metadata and tensors of one model, whatever number of files it is in."""

    fields: dict[str, Any]
    tensors: list[Tensor]


def read_model(path: Path) -> GgufModel:
    """Open the model that ``path`` is, or is a part of; raises :class:`ConvertError`."""
    parts = model_parts(path)
    files = [read_file(part) for part in parts]
    for i, (part, file) in enumerate(zip(parts, files, strict=True)):
        said = (file.fields.get("split.no", 0), count(file.fields, "split.count", 1))
        if said != (i, len(parts)):
            raise ConvertError(
                f"{part.name} says that it is number {said[0]!r} (from 0) of {said[1]} files; "
                "those of a split model lie in one folder, named NAME-00001-of-00003.gguf and so on"
            )
    tensors = [tensor for file in files for tensor in file.tensors]
    expected = files[0].fields.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ConvertError(f"the parts hold {len(tensors)} tensors, and should hold {expected}")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ConvertError("the GGUF holds some tensor twice")
    return GgufModel(files[0].fields, tensors)


def read_file(path: Path) -> GgufModel:
    """Open one file; raises :class:`ConvertError` with its name when it is damaged."""
    try:
        if path.stat().st_size == 0:  # cannot be mapped
            raise _Damaged("it is empty")
        return _parse(np.memmap(path, np.uint8, mode="r"))
    except _Damaged as error:
        raise ConvertError(f"{path} is not a complete GGUF file: {error}") from error


class _Damaged(Exception):
    """The bytes are no GGUF; without the file's name."""


class _Cursor:
    """Reads forward in the file's bytes."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data.data
        self.at = 0

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        end = self.at + size
        if end > len(self.data):
            raise _Damaged(f"it ends after {len(self.data)} bytes, within its head")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, code: str) -> Any:
        """The next number of a :mod:`struct` type."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """The next length and text."""
        raw = self.take(self.number("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise _Damaged(f"a text before byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        """The next metadata value."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise _Damaged(f"there is no metadata type {kind}")
        items, length = self.number("I"), self.number("Q")
        if items == STRING:
            return [self.string() for _ in range(length)]
        if items not in SCALARS:
            raise _Damaged(f"there is no array of metadata type {items}")
        code = SCALARS[items]
        raw = self.take(length * struct.calcsize("<" + code))  # before any list of that length
        return list(struct.unpack(f"<{length}{code}", raw))


def _parse(data: NDArray[np.uint8]) -> GgufModel:
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise _Damaged("it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version not in VERSIONS:
        byte_order = " (or of big-endian byte order)" if version % 65536 == 0 else ""
        raise _Damaged(f"it is of version {version}{byte_order}; supported: little-endian 2 and 3")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.string()
        if name in fields:
            raise _Damaged(f"it has the metadata field {name} twice")
        fields[name] = cursor.value(cursor.number("I"))
    heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"its alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    return GgufModel(fields, [_tensor(data, start, *head) for head in heads])


def _tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape with the slowest axis first, number of the type, and offset in the data."""
    name, num_dims = cursor.string(), cursor.number("I")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise _Damaged(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _tensor(
    data: NDArray[np.uint8], start: int, name: str, shape: Sequence[int], kind: int, offset: int
) -> Tensor:
    """The tensor, its rows mapped; ``start`` is where the file's data begin."""
    known = tensor_kind(name, kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[known]
    if shape[-1] % block:
        raise _Damaged(
            f"tensor {name!r} has rows of {shape[-1]} values, no multiple of {known.name}'s {block}"
        )
    num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
    first, end = start + offset, start + offset + num_rows * row_bytes
    if end > len(data):
        raise _Damaged(f"it ends after {len(data)} bytes, and tensor {name!r} at byte {end}")
    rows = data[first:end].reshape(num_rows, row_bytes)
    return Tensor(name, known, tuple(shape), rows)


# --- quantisations --------------------------------------------------------------------------------


@functools.cache
def supported_kinds() -> frozenset[GGMLQuantizationType]:
    """Every quantisation that the ``gguf`` package decodes: asked for, since it keeps no list."""
    kinds = set()
    for kind in GGMLQuantizationType:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.add(kind)
    return frozenset(kinds)


def tensor_kind(name: str, number: int) -> GGMLQuantizationType:
    """The quantisation with this number; raises :class:`ConvertError` unless it is supported."""
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        called = REMOVED.get(number, f"number {number}")
    else:
        if kind in supported_kinds():
            return kind
        called = kind.name
    supported = ", ".join(kind.name for kind in sorted(supported_kinds()))
    raise ConvertError(
        f"tensor {name!r} has the unsupported quantisation {called}; supported: {supported}"
    )
