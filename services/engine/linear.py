"""Products with weight matrices: ``x @ weight.T + bias``, the bulk of what a model computes.

:class:`Linear` is plain torch, for every device and dtype, and the reference of the other.
:class:`PackedLinear` is for CPUs: weights lie in *panels*, ``[num_outputs / 16, num_inputs, 16]``,
so that one pass over them, from one end to the other, serves all rows. That keeps one row at the
speed of memory and hundreds at that of the processor; at few rows, where a general GEMM is far from
both, it matters most. Weights are float32, or int8 with a scale for each output: then memory gives
a quarter of the bytes, and sums are in float32 all the same.
"""

from typing import Protocol

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor
from torch.nn.functional import embedding, linear

from services.engine.kernels import floats, int8s, tile, tile_int8

PANEL = 16  # outputs side by side: two vectors


class Product(Protocol):
    """A weight matrix ``[num_outputs, num_inputs]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_rows, num_outputs]`` of ``x`` ``[num_rows, num_inputs]``."""

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of some outputs, ``[len(ids), num_inputs]``: an embedding."""

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
    def num_bytes(self) -> int:
        return self.weight.nbytes


class PackedLinear:
    """The form for CPUs: ``x`` and results are float32. ``int8``: weights are rounded to 255 steps
    between the largest of each output and its negative.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        num_panels = -(-self.num_outputs // PANEL)
        lacking = num_panels * PANEL - self.num_outputs
        self.scale: Tensor | None = None
        if int8:
            weight, scale = quantize(weight)
            self.scale = torch.nn.functional.pad(scale, (0, lacking)).contiguous()
        padded = torch.nn.functional.pad(weight, (0, 0, 0, lacking)) if lacking else weight
        self.panels = padded.view(num_panels, PANEL, -1).transpose(1, 2).contiguous()
        self.bias = None
        if bias is not None:
            self.bias = torch.nn.functional.pad(bias.float(), (0, lacking)).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        num_rows, num_panels = len(x), len(self.panels)
        out = torch.empty(num_rows, num_panels * PANEL)
        multiply = _multiply if self.scale is None else _multiply_int8
        multiply(
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
        return found if self.scale is None else found * self.scale[ids][:, None]

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes


def product(weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> Product:
    """The fastest form for the device and dtype that ``weight`` has."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return PackedLinear(weight, bias, int8)
    assert not int8
    return Linear(weight, bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 ``[num_outputs, num_inputs]`` and float32 ``[num_outputs]``, whose product is nearly
    ``weight``.
    """
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    # Of an output without weights the scale is 0, and so is what it is multiplied by.
    steps = (weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return steps.to(torch.int8), scale


# --- kernels --------------------------------------------------------------------------------------

_1, _2, _3, _4, _5, _6 = (tile(rows) for rows in range(1, 7))
_int8_1, _int8_2, _int8_3, _int8_4, _int8_5, _int8_6 = (tile_int8(rows) for rows in range(1, 7))
_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"


@njit(inline="always")
def _multiply_panel(x, x_stride, num_rows, num_inputs, panel, out, out_stride):  # type: ignore[no-untyped-def]
    """All rows, in tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2."""
    num_tiles = (num_rows + 5) // 6
    first = 0
    for left in range(num_tiles, 0, -1):
        height = (num_rows - first + left - 1) // left
        rows, sums = x + 4 * first * x_stride, out + 4 * first * out_stride
        if height == 6:
            _6(rows, x_stride, panel, 16, sums, out_stride, num_inputs)
        elif height == 5:
            _5(rows, x_stride, panel, 16, sums, out_stride, num_inputs)
        elif height == 4:
            _4(rows, x_stride, panel, 16, sums, out_stride, num_inputs)
        elif height == 3:
            _3(rows, x_stride, panel, 16, sums, out_stride, num_inputs)
        elif height == 2:
            _2(rows, x_stride, panel, 16, sums, out_stride, num_inputs)
        else:
            _1(rows, x_stride, panel, 16, sums, out_stride, num_inputs)
        first += height


@njit(inline="always")
def _multiply_panel_int8(x, x_stride, num_rows, num_inputs, panel, out, out_stride):  # type: ignore[no-untyped-def]
    if num_rows > 6:  # each weight becomes a float once, not once for each tile
        wide = np.empty(num_inputs * 16, np.float32)
        narrow = int8s(panel, num_inputs * 16)
        for i in range(num_inputs * 16):
            wide[i] = narrow[i]
        _multiply_panel(x, x_stride, num_rows, num_inputs, wide.ctypes.data, out, out_stride)
    elif num_rows == 6:
        _int8_6(x, x_stride, panel, 16, out, out_stride, num_inputs)
    elif num_rows == 5:
        _int8_5(x, x_stride, panel, 16, out, out_stride, num_inputs)
    elif num_rows == 4:
        _int8_4(x, x_stride, panel, 16, out, out_stride, num_inputs)
    elif num_rows == 3:
        _int8_3(x, x_stride, panel, 16, out, out_stride, num_inputs)
    elif num_rows == 2:
        _int8_2(x, x_stride, panel, 16, out, out_stride, num_inputs)
    else:
        _int8_1(x, x_stride, panel, 16, out, out_stride, num_inputs)


@njit(inline="always")
def _finish(scale, bias, num_rows, out, out_stride):  # type: ignore[no-untyped-def]
    """Scale and bias of one panel's outputs; an address of 0: none."""
    for row in range(num_rows):
        sums = floats(out + 4 * row * out_stride, 16)
        if scale:
            factors = floats(scale, 16)
            for i in range(16):
                sums[i] *= factors[i]
        if bias:
            terms = floats(bias, 16)
            for i in range(16):
                sums[i] += terms[i]


@njit(_SIGNATURE, parallel=True, nogil=True, cache=True)
def _multiply(x, x_stride, num_rows, num_inputs, panels, num_panels, scale, bias, out):  # type: ignore[no-untyped-def]
    for p in prange(num_panels):
        sums, panel = out + 64 * p, panels + 64 * p * num_inputs
        _multiply_panel(x, x_stride, num_rows, num_inputs, panel, sums, 16 * num_panels)
        if bias:
            _finish(0, bias + 64 * p, num_rows, sums, 16 * num_panels)


@njit(_SIGNATURE, parallel=True, nogil=True, cache=True)
def _multiply_int8(x, x_stride, num_rows, num_inputs, panels, num_panels, scale, bias, out):  # type: ignore[no-untyped-def]
    for p in prange(num_panels):
        sums, panel = out + 64 * p, panels + 16 * p * num_inputs
        _multiply_panel_int8(x, x_stride, num_rows, num_inputs, panel, sums, 16 * num_panels)
        added = bias + 64 * p if bias else 0
        _finish(scale + 64 * p, added, num_rows, sums, 16 * num_panels)
