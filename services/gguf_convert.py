"""Converts a GGUF model into a folder as Hugging Face lays it out.

A GGUF's weights are quantised; the folder holds float32 safetensors, ``tokenizer.json`` and the
chat template, and opens in well under a second. Whatever the converter does not know (another
architecture, a rope scaling, an unknown tensor or pre-tokenizer) it refuses by name: a model
converted half right answers nonsense. Knows no cache and no network (:mod:`services.fetch`, whose
``CONVERTER_VERSION`` says when to convert again), and needs no torch.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from services.gguf_config import (
    ROPE_FACTORS,
    Family,
    Shape,
    expected_shapes,
    hf_name,
    model_config,
    model_family,
)
from services.gguf_fields import ConvertError, write_json
from services.gguf_file import Tensor, read_model
from services.gguf_tokenizer import write_tokenizer

__all__ = ["ConvertError", "convert"]

Report = Callable[[str], None]

CHUNK = 4 << 20  # values of one tensor that are decoded at a time
REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Output:
    """One tensor to write."""

    name: str  # Hugging Face's
    shape: Shape
    tensor: Tensor | None  # None: zeros
    num_heads: int = 0  # whose rows are put in order; 0: they are
    scale: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes in the safetensors file."""
        return 4 * int(np.prod(self.shape, dtype=object))


def convert(path: Path, folder: Path, report: Report = lambda text: None) -> None:
    """Write config, weights, tokenizer and chat template of a GGUF model into ``folder``.

    ``path`` is its file, or any part of one that was split; ``folder`` must exist. ``report`` hears
    how far a long conversion is. Raises :class:`ConvertError`; the folder may then hold some of the
    files. Memory holds some rows of one tensor at a time.
    """
    model = read_model(path)
    _, family = model_family(model.fields)
    tensors = {tensor.name: tensor for tensor in model.tensors}
    factors = rope_factors(tensors.pop(ROPE_FACTORS, None))
    scales = take_scales(tensors)
    config = model_config(
        model.fields, {name: tensor.shape for name, tensor in tensors.items()}, factors
    )
    if factors is not None and len(factors) != config["head_dim"] // 2:
        raise ConvertError(f"{ROPE_FACTORS} has {len(factors)} factors for {config['head_dim']}")
    outputs = plan(tensors, scales, config, family)
    # The cheap files first: what is not supported shows before gigabytes are written.
    words = write_tokenizer(model.fields, folder)
    if len(words.tokens) != config["vocab_size"]:
        raise ConvertError(
            f"the GGUF has {len(words.tokens)} tokens, but embeds {config['vocab_size']}"
        )
    roles = {f"{role}_token_id": words.roles.get(role) for role in ("bos", "eos")}
    write_json(folder / "config.json", config | roles)
    write_weights(outputs, folder / "model.safetensors", report)


# --- what is written ------------------------------------------------------------------------------


def rope_factors(tensor: Tensor | None) -> list[float] | None:
    """What each of rope's frequencies is divided by; None when there is no such tensor."""
    if tensor is None:
        return None
    factors = tensor.read().ravel()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ConvertError(f"{ROPE_FACTORS} holds factors that are not positive numbers")
    return [float(str(factor)) for factor in factors]  # the shortest decimals of the float32


def take_scales(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Take the numbers by which whole tensors are multiplied (NVFP4) out of ``tensors``.

    By the tensor's name. Those of its inputs serve hardware that rounds these, too: not needed.
    """
    scales = {}
    for name in list(tensors):
        stem, _, kind = name.rpartition(".")
        if kind not in ("scale", "input_scale") or f"{stem}.weight" not in tensors:
            continue
        values = tensors.pop(name).read().ravel()
        if len(values) != 1 or not np.isfinite(values).all():
            raise ConvertError(f"tensor {name!r} is not one number")
        if kind == "scale":
            scales[f"{stem}.weight"] = float(values[0])
    return scales


def plan(
    tensors: Mapping[str, Tensor],
    scales: Mapping[str, float],
    config: Mapping[str, Any],
    family: Family,
) -> list[Output]:
    """What to write; raises :class:`ConvertError` unless the tensors are those of the model."""
    expected = expected_shapes(config, family)
    if unknown := [name for name in tensors if name not in expected]:
        places = "its layers or kind" if hf_name(unknown[0]) else "what is supported"
        raise ConvertError(f"the GGUF holds tensors beyond {places}: {', '.join(unknown[:5])}")
    optional = () if family.qkv_bias else (".bias",)  # llama.cpp leaves out single ones
    if lacking := [n for n in expected if n not in tensors and not n.endswith(tuple(optional))]:
        raise ConvertError(f"the GGUF lacks the tensors {', '.join(lacking[:5])}")
    outputs = []
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            raise ConvertError(f"tensor {name!r} has the shape {tensor.shape}, expected {shape}")
        target = hf_name(name)
        assert target is not None
        heads = 0
        if family.interleaved and ".attn_q." in name:
            heads = config["num_attention_heads"]
        elif family.interleaved and ".attn_k." in name:
            heads = config["num_key_value_heads"]
        outputs.append(Output(target, shape, tensor, heads, scales.get(name, 1.0)))
    return outputs


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k, ``[num_heads * head_dim, ...]``.

    Rope rotates pairs of dimensions. llama.cpp keeps the two of a pair next to each other, Hugging
    Face half a head apart.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def decoded(output: Output) -> Iterator[NDArray[np.float32]]:
    """The values of one tensor, in order, some rows at a time; raises :class:`ConvertError`."""
    tensor, shape, num_heads = output.tensor, output.shape, output.num_heads
    if tensor is None:
        yield np.zeros(shape, np.float32)
        return
    if len(shape) == 1:
        yield finished(tensor.read().reshape(shape), output, num_heads)
        return
    group = shape[0] // num_heads if num_heads else 1  # rows change places within a head
    step = group * max(1, CHUNK // (group * shape[1]))
    for first in range(0, shape[0], step):
        rows = tensor.read(first, first + step)
        yield finished(rows, output, len(rows) // group if num_heads else 0)


def finished(values: NDArray[np.float32], output: Output, num_heads: int) -> NDArray[np.float32]:
    """Decoded values as they are written."""
    if output.scale != 1.0:
        values = values * np.float32(output.scale)
    if not np.isfinite(values).all():
        raise ConvertError(f"{output.name} holds values that are no numbers: the GGUF is damaged")
    if num_heads:
        values = unpermute(values, num_heads)
    return np.ascontiguousarray(values, dtype="<f4")


# --- writing --------------------------------------------------------------------------------------


def write_weights(outputs: list[Output], path: Path, report: Report) -> None:
    """Write one safetensors file, piece by piece."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for output in outputs:
        end = total + output.num_bytes
        header[output.name] = {
            "dtype": "F32",
            "shape": list(output.shape),
            "data_offsets": [total, end],
        }
        total = end
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise ConvertError(
            f"the float32 weights need {total / 1e9:.1f} GB, {path.parent} has {free / 1e9:.1f} GB"
        )
    done, reported = 0, time.monotonic()
    with path.open("wb") as file:
        write_header(file, header)
        for output in outputs:
            for values in decoded(output):
                done += file.write(values.data)
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    report(f"  {done / 1e9:.1f} of {total / 1e9:.1f} GB ({100 * done // total} %)")


def write_header(file: IO[bytes], header: dict[str, Any]) -> None:
    """The head of a safetensors file: u64 length, and JSON padded so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
