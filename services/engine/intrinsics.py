"""What attention needs of the processor and numba cannot say: written in LLVM's language.

As in :mod:`services.engine.kernels`: floats are of 32 bits, addresses are integers, strides count
elements, nothing is checked, and every sum has one order.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from services.engine.kernels import LANES, emit_prefetch

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_FMA = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)

Value = Any  # of llvmlite, which has no types
Emit = Callable[..., Value]


# --- exponentials ---------------------------------------------------------------------------------


def _exp2_terms() -> list[float]:
    """Coefficients of 2^x for -0.5 <= x <= 0.5, lowest power first: through Chebyshev's points.

    At degree 6 the error is a small part of a float's rounding.
    """
    points = np.polynomial.chebyshev.chebpts1(7) / 2
    fitted = [float(c) for c in np.polynomial.polynomial.polyfit(points, np.exp2(points), 6)]
    return [1.0, *fitted[1:]]  # exp(0) is 1 to the last bit


_EXP2 = _exp2_terms()
_LEAST = -126.0  # 2^x below this is taken as 0
_LOW = -87.0  # e^-x of this is just a float
_ROUNDING = 1.5 * 2**23  # a float of this size has no bits after the point


def _exp(b: Value, x: Value) -> Value:
    """e^x of a vector, within 2 units in the last place; 0 below -87.3; NaN stays NaN."""
    fma = get_or_insert_function(b.module, _FMA, f"llvm.fma.v{LANES}f32")
    in_twos = b.fmul(x, _all(math.log2(math.e)))
    # Rounded to a whole number by losing the bits after the point; the low bits of the sum are it.
    shifted = b.fadd(in_twos, _all(_ROUNDING))
    whole = b.fsub(shifted, _all(_ROUNDING))
    # x - whole * ln(2) in two parts, so that nothing is lost; then in powers of two again.
    high = float(np.float32(math.log(2)))
    rest = b.call(fma, (whole, _all(-high), x))
    rest = b.call(fma, (whole, _all(high - math.log(2)), rest))
    terms = [c * math.log2(math.e) ** i for i, c in enumerate(_EXP2)]
    value = _all(terms[-1])
    for term in reversed(terms[:-1]):
        value = b.call(fma, (value, rest, _all(term)))
    exponent = b.shl(b.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * LANES))
    scaled = b.bitcast(b.add(b.bitcast(value, _INTS), exponent), _VECTOR)
    return b.select(b.fcmp_ordered("<", in_twos, _all(_LEAST)), _all(0.0), scaled)


def _exp_row(typing: Any, row: Any, count: Any, largest: Any, factor: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        row, count, largest, factor = args
        start = b.inttoptr(row, _F32.as_pointer())
        most, times = _spread(b, largest), _spread(b, factor)
        with _loop(b, count, [_all(0.0)]) as (index, (total,), following):
            place = _place(b, start, index)
            value = _exp(b, b.fmul(b.fsub(b.load(place, align=4), most), times))
            b.store(value, place, align=4)
            following.append(b.fadd(total, value))
        return _add_up(b, following[0])

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


exp_row: Callable[..., Any] = intrinsic(_exp_row)
"""``exp_row(row, count, largest, factor)``: ``row = exp((row - largest) * factor)``, and the sum.

``count``: a multiple of ``LANES``, at least one of them, as below.
"""


def _largest(typing: Any, row: Any, count: Any, least: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        row, count, least = args
        start = b.inttoptr(row, _F32.as_pointer())
        with _loop(b, count, [_spread(b, least)]) as (index, (most,), following):
            value = b.load(_place(b, start, index), align=4)
            following.append(b.select(b.fcmp_ordered(">", value, most), value, most))
        most = following[0]
        for distance in (4, 2, 1):
            other = _shuffle(b, most, most, [(i + distance) % LANES for i in range(LANES)])
            most = b.select(b.fcmp_ordered(">", other, most), other, most)
        return b.extract_element(most, _I32(0))

    return types.float32(types.int64, types.int64, types.float32), generate


largest: Callable[..., Any] = intrinsic(_largest)
"""``largest(row, count, least)``: the largest of a row and ``least``, of what is a number."""


def _sum_squares(typing: Any, row: Any, count: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        start = b.inttoptr(args[0], _F32.as_pointer())
        fma = get_or_insert_function(b.module, _FMA, f"llvm.fma.v{LANES}f32")
        with _loop(b, args[1], [_all(0.0)]) as (index, (total,), following):
            value = b.load(_place(b, start, index), align=4)
            following.append(b.call(fma, (value, value, total)))
        return _add_up(b, following[0])

    return types.float32(types.int64, types.int64), generate


sum_squares: Callable[..., Any] = intrinsic(_sum_squares)
"""``sum_squares(row, count)``."""


def _gate(typing: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        starts = [b.inttoptr(address, _F32.as_pointer()) for address in args[:3]]
        with _loop(b, args[3], []) as (index, _, _):
            gate, up, out = (_place(b, start, index) for start in starts)
            x = b.load(gate, align=4)
            low = b.select(
                b.fcmp_ordered("<", x, _all(_LOW)), _all(_LOW), x
            )  # below, x / e^-x is 0
            weight = b.fadd(_all(1.0), _exp(b, b.fneg(low)))
            b.store(b.fmul(b.fdiv(x, weight), b.load(up, align=4)), out, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


gate: Callable[..., Any] = intrinsic(_gate)
"""``gate(gate, up, out, count)``: ``out = silu(gate) * up``."""


# --- keys turned ----------------------------------------------------------------------------------

_PAIRS = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
_FOURS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
_HALVES = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


def _transpose(typing: Any, source: Any, stride: Any, out: Any, out_stride: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        source, stride, out, out_stride = args
        source = b.inttoptr(source, _F32.as_pointer())
        out = b.inttoptr(out, _F32.as_pointer())
        rows = [b.load(_place(b, source, b.mul(stride, _I64(i))), align=4) for i in range(LANES)]
        # Three rounds, of rows 1, 2, 4 apart; what the processor has works within halves first.
        pairs = [_shuffle(b, rows[i], rows[i + 1], m) for i in range(0, 8, 2) for m in _PAIRS]
        fours = [
            _shuffle(b, pairs[i + j], pairs[i + j + 2], m)
            for i in (0, 4)
            for j in (0, 1)
            for m in _FOURS
        ]
        turned = [_shuffle(b, fours[i], fours[i + 4], m) for m in _HALVES for i in range(4)]
        for i, vector in enumerate(turned):
            b.store(vector, _place(b, out, b.mul(out_stride, _I64(i))), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


transpose: Callable[..., Any] = intrinsic(_transpose)
"""``transpose(source, stride, out, out_stride)``: ``LANES`` by ``LANES`` floats."""


# --- memory ---------------------------------------------------------------------------------------


def _prefetch(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        emit_prefetch(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch: Callable[..., Any] = intrinsic(_prefetch)
"""``prefetch(address)``: the line of 64 bytes there will be read."""


def _take(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        pointer = b.inttoptr(args[0], _I64.as_pointer())
        return b.atomic_rmw("add", pointer, _I64(1), "seq_cst")

    return types.int64(types.int64), generate


take: Callable[..., Any] = intrinsic(_take)
"""``take(address)``: the int64 there, which counts up by one: each thread gets another number."""


# --- parts ----------------------------------------------------------------------------------------


def _all(value: float) -> Value:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * LANES)


def _spread(b: Value, value: Value) -> Value:
    first = b.insert_element(_UNDEFINED, value, _I32(0))
    return _shuffle(b, first, _UNDEFINED, [0] * LANES)


def _shuffle(b: Value, x: Value, y: Value, lanes: list[int]) -> Value:
    return b.shuffle_vector(x, y, ir.Constant(_INTS, lanes))


def _add_up(b: Value, vector: Value) -> Value:
    for distance in (4, 2, 1):
        lanes = [(i + distance) % LANES for i in range(LANES)]
        vector = b.fadd(vector, _shuffle(b, vector, vector, lanes))
    return b.extract_element(vector, _I32(0))


def _place(b: Value, start: Value, index: Value) -> Value:
    return b.bitcast(b.gep(start, [index]), _VECTOR.as_pointer())


@contextmanager
def _loop(
    b: Value, count: Value, first: list[Value]
) -> Iterator[tuple[Value, list[Value], list[Value]]]:
    """Code between runs for index 0, ``LANES``, … below ``count``. It yields the index, values that
    go round, which start as ``first``, and the list to which it appends what they become.
    """
    before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    index = b.phi(_I64)
    index.add_incoming(_I64(0), before)
    values = [b.phi(value.type) for value in first]
    following: list[Value] = []
    yield index, values, following
    for value, start, new in zip(values, first, following, strict=True):
        value.add_incoming(start, before)
        value.add_incoming(new, b.block)
    next_index = b.add(index, _I64(LANES))
    index.add_incoming(next_index, b.block)
    b.cbranch(b.icmp_signed("<", next_index, count), loop, after)
    b.position_at_end(after)
