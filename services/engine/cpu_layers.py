"""All layers of a model in a few calls, for CPUs: compiled code from embedding to last norm.

Between two kernels that Python calls pass some ten microseconds, in which waiting threads fall
asleep; a step of one token has hundreds of kernels. Here one follows the other at once. The kernels
are those of ``linear``, ``cpu_ops`` and ``paged_attention``; the reference is ``Model.forward``.
"""

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit
from torch import Tensor

from services.engine.attention_kernels import attend
from services.engine.compiled import compiled
from services.engine.cpu_ops import add_norm, gate_rows, place
from services.engine.kernels import LANES, int64s
from services.engine.linear import PackedLinear, multiply, multiply_int8
from services.engine.paged_attention import PagedAttention, PagedPlan

if TYPE_CHECKING:
    from services.engine.model import Layer, Model

# Columns of a layer's row in the table: addresses, but for the last two.
_INPUT_NORM, _QKV, _QK_NORM, _OUTPUT, _POST_NORM, _GATE_UP, _DOWN = 0, 1, 4, 5, 8, 9, 12
_ROTATED, _WINDOW, _WIDTH = 15, 16, 17
"""A product takes three: panels, scales, bias; 0 where there is none."""

PARTS = 5
"""Of a step, with a pause between each two: a message that comes in its middle waits for a tenth of
the step, where one call waits for a half. More of them would be felt in the step.
"""


@njit
def _product(x, x_stride, num_rows, num_inputs, weights, num_panels, out):  # type: ignore[no-untyped-def]
    """``weights``: the address of a product's three columns."""
    columns = int64s(weights, 3)
    panels, scale, bias = columns[0], columns[1], columns[2]
    if scale:
        multiply_int8(x, x_stride, num_rows, num_inputs, panels, num_panels, scale, bias, out)
    else:
        multiply(x, x_stride, num_rows, num_inputs, panels, num_panels, scale, bias, out)


@compiled("void(int64, int64, int64, int64, int64[::1], int64[::1], float64, float64)")
def _run(table, num_layers, first, end, shape, step, eps, factor):  # type: ignore[no-untyped-def]
    """Layers ``first`` to ``end``; what is between two calls is in the step's buffers."""
    hidden_size, num_heads, num_kv_heads, dim = shape[0], shape[1], shape[2], shape[3]
    middle, block_size = shape[4], shape[5]
    block_stride, layer_stride, plane = shape[6], shape[7], shape[8]
    num_tokens, hidden, x, qkv, attended = step[0], step[1], step[2], step[3], step[4]
    gate_up, gated, y, kv, cos, sin, slots = (
        step[5], step[6], step[7], step[8], step[9], step[10], step[11]
    )  # fmt: skip
    blocks, items, num_items, done, parts = step[12], step[13], step[14], step[15], step[16]
    scratch, scratch_stride, num_threads = step[17], step[18], step[19]
    share = num_heads // num_kv_heads
    qkv_panels = ((num_heads + 2 * num_kv_heads) * dim + 15) // 16
    gate_up_panels = (2 * middle + 15) // 16
    hidden_panels = (hidden_size + 15) // 16
    y_stride = 16 * hidden_panels
    added = y if first else 0  # what the layer before has left to add
    for index in range(first, end):
        place_of = table + 8 * _WIDTH * index
        layer = int64s(place_of, _WIDTH)
        add_norm(hidden, added, y_stride, layer[_INPUT_NORM], eps, x, num_tokens, hidden_size)
        _product(x, hidden_size, num_tokens, hidden_size, place_of + 8 * _QKV, qkv_panels, qkv)
        keys = kv + 4 * index * layer_stride
        place(
            qkv, 16 * qkv_panels, num_tokens, num_heads, num_kv_heads, dim, layer[_QK_NORM], eps,
            cos * layer[_ROTATED], sin * layer[_ROTATED],
            keys, block_stride, plane, block_size, slots,
        )  # fmt: skip
        attend(
            keys, block_stride, plane, block_size, num_kv_heads, share, dim,
            qkv, 16 * qkv_panels, attended, num_heads * dim, blocks, items, num_items,
            layer[_WINDOW], np.float32(factor), done, parts, scratch, scratch_stride, num_threads,
        )  # fmt: skip
        width = num_heads * dim
        _product(attended, width, num_tokens, width, place_of + 8 * _OUTPUT, hidden_panels, y)
        add_norm(hidden, y, y_stride, layer[_POST_NORM], eps, x, num_tokens, hidden_size)
        _product(
            x,
            hidden_size,
            num_tokens,
            hidden_size,
            place_of + 8 * _GATE_UP,
            gate_up_panels,
            gate_up,
        )
        gate_rows(gate_up, 16 * gate_up_panels, gated, num_tokens, middle)
        _product(gated, middle, num_tokens, middle, place_of + 8 * _DOWN, hidden_panels, y)
        added = y
    if end == num_layers:
        add_norm(hidden, added, y_stride, step[20], eps, x, num_tokens, hidden_size)


def _columns(product: PackedLinear) -> list[int]:
    return [
        product.panels.data_ptr(),
        0 if product.scale is None else product.scale.data_ptr(),
        0 if product.bias is None else product.bias.data_ptr(),
    ]


class CpuLayers:
    """The layers of one model; several engines may run it at once, in a thread each."""

    @staticmethod
    def fits(model: "Model") -> bool:
        """Whether the model is one for these kernels: float32 on a CPU, of whole vectors."""
        config, first = model.config, model.layers[0]
        if not isinstance(first.down, PackedLinear):
            return False
        sizes = config.hidden_size, config.head_dim, first.down.num_inputs
        return all(size % LANES == 0 for size in sizes)

    def __init__(self, model: "Model") -> None:
        config = model.config
        self._eps = config.rms_norm_eps
        self._norm = model.norm
        self._layers = model.layers  # the table holds addresses in them
        self._table = np.array([self._row(layer) for layer in model.layers], dtype=np.int64)
        down = model.layers[0].down
        assert isinstance(down, PackedLinear)
        self._middle = down.num_inputs
        self._sizes = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.attention = PagedAttention(config.num_heads, config.num_kv_heads, config.head_dim)

    @staticmethod
    def _row(layer: "Layer") -> list[int]:
        parts = layer.qkv, layer.output, layer.gate_up, layer.down
        qkv, output, gate_up, down = (_columns(p) for p in parts if isinstance(p, PackedLinear))
        norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
        row = [layer.input_norm.data_ptr(), *qkv, norm, *output, layer.post_norm.data_ptr()]
        return [*row, *gate_up, *down, int(layer.rotated), layer.window]

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        plan: PagedPlan,
        pause: Callable[[], None],
    ) -> Tensor:
        """Hidden states after the last norm, ``[num_tokens, hidden_size]``, of the embeddings in
        ``hidden``, which is overwritten. ``cos``, ``sin``: ``[num_tokens, head_dim / 2]``.
        ``pause`` is called between ``PARTS`` parts of the layers.
        """
        hidden_size, num_heads, num_kv_heads, dim = self._sizes
        num_tokens = len(hidden)
        x = torch.empty(num_tokens, hidden_size)
        buffers = [
            torch.empty(num_tokens, -(-columns // 16) * 16)
            for columns in (
                (num_heads + 2 * num_kv_heads) * dim,
                num_heads * dim,
                2 * self._middle,
                self._middle,
                hidden_size,
            )
        ]
        block_stride, layer_stride, plane = kv.stride()[:3]
        shape = (*self._sizes, self._middle, kv.shape[4], block_stride, layer_stride, plane)
        step = [num_tokens, hidden.data_ptr(), x.data_ptr(), *(b.data_ptr() for b in buffers)]
        step += [kv.data_ptr(), cos.data_ptr(), sin.data_ptr(), plan.slots.ctypes.data]
        step += [*self.attention.addresses(plan), self._norm.data_ptr()]
        arrays = np.array(shape), np.array(step)
        num_layers = len(self._table)
        parts = min(PARTS, num_layers)
        for part in range(parts):
            if part:
                pause()
            first, end = (each * num_layers // parts for each in (part, part + 1))
            table = self._table.ctypes.data
            _run(table, num_layers, first, end, *arrays, self._eps, 1 / sqrt(dim))
        return x
