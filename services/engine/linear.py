"""Products with weight matrices: ``x @ weight.T + bias``, the bulk of what a model computes.

:class:`Linear` is plain torch, for every device and dtype, and the reference of the other.
:class:`PackedLinear` is for CPUs: weights lie in *panels*, ``[num_outputs / 16, num_inputs, 16]``,
so that one pass over them, from one end to the other, serves all rows. That keeps one row at the
speed of memory and hundreds at that of the processor; at few rows, where a general GEMM is far from
both, it matters most. Weights are float32, or int8 with a scale for each output and ``GROUP``
inputs: then memory gives a quarter of the bytes, and sums are in float32 all the same.
"""

from typing import Protocol

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor
from torch.nn.functional import embedding, linear

from services.engine.compiled import compiled
from services.engine.kernels import MAX_ROWS, floats, tile, tile_ahead, tile_int8, widen

PANEL = 16  # outputs side by side: two vectors
GROUP = 64  # inputs, of int8 weights that share a scale; one for all would cost several times more


class Product(Protocol):
    """A weight matrix ``[num_outputs, num_inputs]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_rows, num_outputs]`` of ``x`` ``[num_rows, num_inputs]``."""

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of some outputs, ``[len(ids), num_inputs]``: an embedding."""

    @property
    def num_weights(self) -> int:
        """Numbers in the matrix."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""


class Linear:
    """The plain form, with a bias ``[num_outputs]`` or none."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)

    @property
    def num_weights(self) -> int:
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


class PackedLinear:
    """The form for CPUs: ``x`` and results are float32. ``int8``: see :func:`quantize`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        num_panels = -(-self.num_outputs // PANEL)
        lacking = num_panels * PANEL - self.num_outputs

        def in_panels(matrix: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(matrix, (0, 0, 0, lacking)) if lacking else matrix
            return padded.reshape(num_panels, PANEL, -1).transpose(1, 2).contiguous()

        self.scale: Tensor | None = None  # [num_panels, number of groups, PANEL]
        if int8:
            weight, scale = quantize(weight)
            self.scale = in_panels(scale)
        self.panels = in_panels(weight)
        self.bias = None
        if bias is not None:
            self.bias = torch.nn.functional.pad(bias.float(), (0, lacking)).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.num_inputs:
            raise ValueError(f"{x.shape[1]} inputs for weights of {self.num_inputs}")
        if x.stride(-1) != 1:
            x = x.contiguous()
        num_rows, num_panels = len(x), len(self.panels)
        out = torch.empty(num_rows, num_panels * PANEL)
        kernel = multiply if self.scale is None else multiply_int8
        kernel(
            x.data_ptr(),
            x.stride(0),
            num_rows,
            self.num_inputs,
            self.panels.data_ptr(),
            num_panels,
            0 if self.scale is None else self.scale.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
        )
        return out if self.num_outputs == out.shape[1] else out[:, : self.num_outputs]

    def rows(self, ids: Tensor) -> Tensor:
        found = self.panels[ids // PANEL, :, ids % PANEL]
        if self.scale is None:
            return found
        return dequantize(found, self.scale[ids // PANEL, :, ids % PANEL])

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (0 if self.scale is None else self.scale.nbytes)


def product(weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> Product:
    """The fastest form for the device and dtype that ``weight`` has."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return PackedLinear(weight, bias, int8)
    assert not int8
    return Linear(weight, bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 ``[num_outputs, num_inputs]``, and a float32 scale for each output and ``GROUP`` inputs,
    ``[num_outputs, number of groups]``: the largest of a group is 127 steps.
    """
    num_outputs, num_inputs = weight.shape
    lacking = -num_inputs % GROUP
    groups = torch.nn.functional.pad(weight.float(), (0, lacking)).view(num_outputs, -1, GROUP)
    scale = groups.abs().amax(-1) / 127
    # Where all are 0 the scale is 0 too: nothing must be divided by it.
    steps = (groups / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round_()
    return steps.to(torch.int8).view(num_outputs, -1)[:, :num_inputs], scale


def dequantize(steps: Tensor, scale: Tensor) -> Tensor:
    """float32: what :func:`quantize` has made of the weights."""
    return steps * scale.repeat_interleave(GROUP, 1)[:, : steps.shape[1]]


# --- kernels --------------------------------------------------------------------------------------

_tile, _tile_ahead, _tile_int8 = tile(), tile_ahead(), tile_int8()
_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"


@njit(inline="always")
def _multiply_panel(  # type: ignore[no-untyped-def]
    x, x_stride, num_rows, num_inputs, panel, out, out_stride, ahead, ahead_stride
):
    """All rows, in tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2.

    Only the first tile waits for memory. That it is not idle during the others, each of them
    fetches a part of the next panel: ``ahead``, with ``ahead_stride`` bytes for an input.
    """
    if num_rows <= MAX_ROWS:
        _tile(num_rows, x, x_stride, panel, 16, out, out_stride, num_inputs)
        return
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    step = ahead_stride // num_tiles
    first = 0
    for left in range(num_tiles, 0, -1):
        height = (num_rows - first + left - 1) // left
        rows, sums = x + 4 * first * x_stride, out + 4 * first * out_stride
        _tile_ahead(height, rows, x_stride, panel, 16, sums, out_stride, num_inputs, ahead, step)
        first += height
        ahead += step * num_inputs


@njit(inline="always")
def _widen(panel, scale, num_inputs, wide):  # type: ignore[no-untyped-def]
    """A panel of int8 as float32."""
    for first in range(0, num_inputs, GROUP):
        factors = scale + 64 * (first // GROUP)
        widen(panel + 16 * first, factors, wide + 64 * first, min(GROUP, num_inputs - first))


@njit(inline="always")
def _clear(num_rows, out, out_stride):  # type: ignore[no-untyped-def]
    for row in range(num_rows):
        sums = floats(out + 4 * row * out_stride, 16)
        for i in range(16):
            sums[i] = 0


@njit(inline="always")
def _add_bias(bias, num_rows, out, out_stride):  # type: ignore[no-untyped-def]
    terms = floats(bias, 16)
    for row in range(num_rows):
        sums = floats(out + 4 * row * out_stride, 16)
        for i in range(16):
            sums[i] += terms[i]


@compiled(_SIGNATURE, parallel=True)
def multiply(x, x_stride, num_rows, num_inputs, panels, num_panels, scale, bias, out):  # type: ignore[no-untyped-def]
    out_stride = 16 * num_panels
    for p in prange(num_panels):
        sums, panel = out + 64 * p, panels + 64 * p * num_inputs
        _multiply_panel(
            x, x_stride, num_rows, num_inputs, panel, sums, out_stride, panel + 64 * num_inputs, 64
        )
        if bias:
            _add_bias(bias + 64 * p, num_rows, sums, out_stride)


@compiled(_SIGNATURE, parallel=True)
def multiply_int8(x, x_stride, num_rows, num_inputs, panels, num_panels, scale, bias, out):  # type: ignore[no-untyped-def]
    out_stride = 16 * num_panels
    num_groups = (num_inputs + GROUP - 1) // GROUP
    for p in prange(num_panels):
        sums, panel, scales = (
            out + 64 * p,
            panels + 16 * p * num_inputs,
            scale + 64 * p * num_groups,
        )
        if num_rows > MAX_ROWS:  # each weight becomes a float once, not once for each tile
            wide = np.empty(num_inputs * 16, np.float32)
            _widen(panel, scales, num_inputs, wide.ctypes.data)
            _multiply_panel(
                x, x_stride, num_rows, num_inputs, wide.ctypes.data, sums, out_stride,
                panel + 16 * num_inputs, 16,
            )  # fmt: skip
        else:
            _clear(num_rows, sums, out_stride)
            for g in range(num_groups):
                first = g * GROUP
                count = min(GROUP, num_inputs - first)
                group = panel + 16 * first
                _tile_int8(
                    num_rows,
                    x + 4 * first,
                    x_stride,
                    group,
                    scales + 64 * g,
                    sums,
                    out_stride,
                    count,
                )
        if bias:
            _add_bias(bias + 64 * p, num_rows, sums, out_stride)
