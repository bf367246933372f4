"""What a model does between its products, for CPUs: a step over the rows, once through memory each.

Float32 all. Addresses are integers, strides count elements, nothing is checked; threads share the
rows, or heads, where there are enough of them. The reference of all is ``Model.forward``.
"""

import numpy as np
from numba import njit, prange

from services.engine.compiled import compiled
from services.engine.intrinsics import gate, sum_squares
from services.engine.kernels import floats, int64s

ALONE = 2048  # numbers that one thread is done with before a second one would have begun


@njit
def _norm_row(x, weight, eps, out, size):  # type: ignore[no-untyped-def]
    """``out = x / sqrt(mean(x * x) + eps) * weight``; ``out`` may be ``x``."""
    mean = sum_squares(x, size) / np.float32(size)
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    row, factors, normed = floats(x, size), floats(weight, size), floats(out, size)
    for i in range(size):
        normed[i] = row[i] * scale * factors[i]


@njit
def _add_norm_row(hidden, added, weight, eps, out, size):  # type: ignore[no-untyped-def]
    if added:
        x, y = floats(hidden, size), floats(added, size)
        for i in range(size):
            x[i] += y[i]
    _norm_row(hidden, weight, eps, out, size)


@compiled("void(int64, int64, int64, int64, float64, int64, int64, int64)", parallel=True)
def _add_norm_many(hidden, added, added_stride, weight, eps, out, num_rows, size):  # type: ignore[no-untyped-def]
    for r in prange(num_rows):
        y = added + 4 * r * added_stride if added else 0
        _add_norm_row(hidden + 4 * r * size, y, weight, eps, out + 4 * r * size, size)


@njit(nogil=True)
def add_norm(hidden, added, added_stride, weight, eps, out, num_rows, size):  # type: ignore[no-untyped-def]
    """``hidden += added`` (address 0: nothing), and ``out`` is its RMS norm times ``weight``.

    ``hidden`` and ``out``: ``[num_rows, size]``.
    """
    if num_rows * size > ALONE:
        _add_norm_many(hidden, added, added_stride, weight, eps, out, num_rows, size)
    else:
        for r in range(num_rows):
            y = added + 4 * r * added_stride if added else 0
            _add_norm_row(hidden + 4 * r * size, y, weight, eps, out + 4 * r * size, size)


@njit
def _turn(head, cos, sin, half):  # type: ignore[no-untyped-def]
    """Rotary embedding of one head, in place; ``sin`` is that of the second half."""
    for i in range(half):
        low, high = head[i], head[half + i]
        head[i] = low * cos[i] - high * sin[i]
        head[half + i] = high * cos[i] + low * sin[i]


@njit
def _place_token(  # type: ignore[no-untyped-def]
    qkv, num_heads, num_kv_heads, dim, norm, eps, cos, sin, keys, plane, slot_stride
):
    """One token of :func:`place`; ``keys``: where its first key goes."""
    for h in range(num_heads + num_kv_heads):
        head = qkv + 4 * h * dim
        if norm:
            _norm_row(head, norm + 4 * h * dim, eps, head, dim)
        if cos:
            _turn(floats(head, dim), floats(cos, dim // 2), floats(sin, dim // 2), dim // 2)
    for h in range(num_kv_heads):
        key = floats(qkv + 4 * (num_heads + h) * dim, dim)
        value = floats(qkv + 4 * (num_heads + num_kv_heads + h) * dim, dim)
        new_key = floats(keys + 4 * h * slot_stride, dim)
        new_value = floats(keys + 4 * (plane + h * slot_stride), dim)
        for i in range(dim):
            new_key[i] = key[i]
            new_value[i] = value[i]


@compiled(
    "void(int64, int64, int64, int64, int64, int64, int64, float64, int64, int64, int64, int64,"
    "int64, int64, int64)",
    parallel=True,
)
def place(  # type: ignore[no-untyped-def]
    qkv, qkv_stride, num_tokens, num_heads, num_kv_heads, dim, norm, eps, cos, sin,
    kv, block_stride, plane, block_size, slots,
):  # fmt: skip
    """Norm and rotate queries and keys in place, and write keys and values to their slots.

    ``qkv``: rows of ``num_heads + 2 * num_kv_heads`` heads. ``norm``: a weight for each number of
    each query and key head, or 0. ``cos``, ``sin``: ``[num_tokens, dim / 2]``, or 0 for no
    rotation. ``kv``: the layer's keys in block 0, values lie ``plane`` behind; ``slots``: int64
    ``[num_tokens, 2]``, block and offset.
    """
    for t in prange(num_tokens):
        slot = int64s(slots + 16 * t, 2)
        angle = 4 * t * (dim // 2)
        _place_token(
            qkv + 4 * t * qkv_stride, num_heads, num_kv_heads, dim, norm, eps,
            cos + angle if cos else 0, sin + angle if cos else 0,
            kv + 4 * (slot[0] * block_stride + slot[1] * dim), plane, block_size * dim,
        )  # fmt: skip


@compiled("void(int64, int64, int64, int64, int64)", parallel=True)
def _gate_many(gate_up, stride, out, num_rows, size):  # type: ignore[no-untyped-def]
    for r in prange(num_rows):
        row = gate_up + 4 * r * stride
        gate(row, row + 4 * size, out + 4 * r * size, size)


@njit(nogil=True)
def gate_rows(gate_up, stride, out, num_rows, size):  # type: ignore[no-untyped-def]
    """``out = silu(gate) * up``, ``[num_rows, size]``, of rows that hold both; ``size`` is whole
    vectors.
    """
    if num_rows * size > 2 * ALONE:
        _gate_many(gate_up, stride, out, num_rows, size)
    else:
        for r in range(num_rows):
            row = gate_up + 4 * r * stride
            gate(row, row + 4 * size, out + 4 * r * size, size)
