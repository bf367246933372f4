"""The inner loop of every product on a CPU: a tile of a few rows by a few vectors of columns.

``tile(vectors)`` gives a function for numba code: ``out[r, c] = sum over i of x[r, i] * w[i, c]``,
for up to ``MAX_ROWS`` rows and ``vectors * LANES`` columns, with all sums in registers. Numba has
no vector type, so the loop is written in LLVM's language, which is the same for every processor:
LLVM turns vectors of eight floats into what the machine has. A product's result for one row does
not depend on which rows are computed with it: each sum runs over ``i`` in order, by fused
multiply-add.

Addresses are plain integers (``array.ctypes.data``), strides count elements. Nothing is checked.
"""

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import carray, config, njit, set_num_threads, types
from numba.core.cgutils import for_range, get_or_insert_function
from numba.extending import intrinsic

log = logging.getLogger(__name__)

LANES = 8
MAX_ROWS = 6  # with two vectors: 12 sums, 2 of w, 1 of x are 15 of the 16 registers of AVX2

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_FMA = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
_PREFETCH = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)
_FIRST = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)

Value = Any  # of llvmlite, which has no types


@lru_cache
def tile(vectors: int = 2, add: bool = False) -> Callable[..., None]:
    """``f(rows, x, x_stride, w, w_stride, out, out_stride, count)``: float32 all, at least one row
    and a ``count`` of 1. ``add``: the sums go on from what ``out`` holds.
    """
    return _kernel(vectors, _F32, add)


@lru_cache
def tile_ahead() -> Callable[..., None]:
    """``f(rows, x, x_stride, w, w_stride, out, out_stride, count, ahead, step)``: ``tile()`` that
    also fetches what is read later into the caches: ``count * step`` bytes from ``ahead`` on.
    """
    return _kernel(2, _F32, False, ahead=True)


@lru_cache
def tile_int8() -> Callable[..., None]:
    """``f(rows, x, x_stride, w, scale, out, out_stride, count)``, of two vectors: ``w`` is int8,
    row after row; ``out`` grows by the sums times ``scale``, one float32 for each column.
    """
    return _kernel(2, _I8, True)


def _kernel(vectors: int, weight: Value, add: bool, ahead: bool = False) -> Callable[..., None]:
    """A loop for each number of rows, and a jump to one of them."""

    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        cases = {rows: b.append_basic_block() for rows in range(1, MAX_ROWS + 1)}
        end = b.append_basic_block()
        jump = b.switch(args[0], cases[1])
        for rows, block in cases.items():
            if rows > 1:
                jump.add_case(rows, block)
            b.position_at_end(block)
            _emit(b, rows, vectors, weight, add, *args[1:])
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    def product(
        typing: Any, rows: Any, x: Any, xs: Any, w: Any, ws: Any, out: Any, os: Any, n: Any
    ) -> Any:
        return types.void(*[types.int64] * 8), generate

    def product_ahead(
        typing: Any, rows: Any, x: Any, xs: Any, w: Any, ws: Any, out: Any, os: Any, n: Any,
        at: Any, step: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 10), generate

    kernel: Callable[..., None] = intrinsic(product_ahead if ahead else product)
    return kernel


def _emit(
    b: Value,
    rows: int,
    vectors: int,
    weight: Value,
    add: bool,
    x: Value,
    x_stride: Value,
    w: Value,
    w_stride: Value,  # of int8: the scales' address
    out: Value,
    out_stride: Value,
    count: Value,
    ahead: Value = None,
    step: Value = None,
) -> None:
    x_rows = [_at(b, b.inttoptr(x, _F32.as_pointer()), x_stride, r) for r in range(rows)]
    out_rows = [_at(b, b.inttoptr(out, _F32.as_pointer()), out_stride, r) for r in range(rows)]
    places = [[_vector_at(b, row, v, _VECTOR) for v in range(vectors)] for row in out_rows]
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    narrow = weight is not _F32
    first = [[_load(b, p) if add and not narrow else zero for p in row] for row in places]
    w_start = b.inttoptr(w, weight.as_pointer())
    before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(loop)

    b.position_at_end(loop)
    index = b.phi(_I64)
    index.add_incoming(_I64(0), before)
    sums = [[b.phi(_VECTOR) for _ in row] for row in first]
    w_row = b.gep(w_start, [b.mul(index, _I64(vectors * LANES) if narrow else w_stride)])
    w_vectors = [_load_weight(b, w_row, v, weight) for v in range(vectors)]
    if ahead is not None:
        emit_prefetch(b, b.add(ahead, b.mul(index, step)))
    fma = get_or_insert_function(b.module, _FMA, f"llvm.fma.v{LANES}f32")
    following = []
    for r in range(rows):
        value = b.load(b.gep(x_rows[r], [index]))
        everywhere = b.shuffle_vector(
            b.insert_element(_UNDEFINED, value, _I32(0)), _UNDEFINED, _FIRST
        )
        following.append(
            [
                b.call(fma, (everywhere, other, s))
                for other, s in zip(w_vectors, sums[r], strict=True)
            ]
        )
    for r in range(rows):
        for v in range(vectors):
            sums[r][v].add_incoming(first[r][v], before)
            sums[r][v].add_incoming(following[r][v], loop)
    next_index = b.add(index, _I64(1))
    index.add_incoming(next_index, loop)
    b.cbranch(b.icmp_signed("<", next_index, count), loop, after)

    b.position_at_end(after)
    for v in range(vectors):
        if narrow:
            scale = _load(b, _vector_at(b, b.inttoptr(w_stride, _F32.as_pointer()), v, _VECTOR))
        for r in range(rows):
            total = following[r][v]
            if narrow:
                total = b.call(fma, (total, scale, _load(b, places[r][v])))
            b.store(total, places[r][v], align=4)


def _widen(typing: Any, w: Any, scale: Any, out: Any, count: Any) -> Any:
    def generate(context: Any, b: Value, signature: Any, args: Any) -> Value:
        w, scale, out, count = args
        w, scale, out = (
            b.inttoptr(address, kind.as_pointer())
            for address, kind in ((w, _I8), (scale, _F32), (out, _F32))
        )
        factors = [_load(b, _vector_at(b, scale, v, _VECTOR)) for v in range(2)]
        with for_range(b, count) as loop:
            first = b.mul(loop.index, _I64(2 * LANES))
            for v in range(2):
                wide = b.fmul(_load_weight(b, b.gep(w, [first]), v, _I8), factors[v])
                b.store(wide, _vector_at(b, b.gep(out, [first]), v, _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


widen: Callable[..., None] = intrinsic(_widen)
"""``widen(w, scale, out, count)``: ``out`` float32 is ``w`` times ``scale``, int8 ``[count, 2 *
LANES]`` by a float32 for each column.
"""


def emit_prefetch(b: Value, address: Value) -> None:
    """The line of 64 bytes there, to read, into all caches; an address may be nobody's."""
    fetch = get_or_insert_function(b.module, _PREFETCH, "llvm.prefetch.p0")
    b.call(fetch, (b.inttoptr(address, _I8.as_pointer()), _I32(0), _I32(3), _I32(1)))


def _at(b: Value, pointer: Value, stride: Value, row: int) -> Value:
    return b.gep(pointer, [b.mul(stride, _I64(row))])


def _vector_at(b: Value, pointer: Value, vector: int, kind: Value) -> Value:
    return b.bitcast(b.gep(pointer, [_I64(vector * LANES)]), kind.as_pointer())


def _load(b: Value, place: Value) -> Value:
    return b.load(place, align=4)


def _load_weight(b: Value, row: Value, vector: int, weight: Value) -> Value:
    if weight is _F32:
        return _load(b, _vector_at(b, row, vector, _VECTOR))
    narrow = b.load(_vector_at(b, row, vector, ir.VectorType(weight, LANES)), align=1)
    return b.sitofp(b.sext(narrow, ir.VectorType(_I32, LANES)), _VECTOR)


def _view(kind: Any) -> Callable[..., Any]:
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Value, signature: Any, args: Any) -> Value:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    at = intrinsic(pointer)

    @njit(inline="always")
    def view(address, count):  # type: ignore[no-untyped-def]
        return carray(at(address), count)

    made: Callable[..., Any] = view
    return made


def use_threads(count: int) -> None:
    """Kernels that this thread calls run on ``count`` threads, at most one per processor."""
    set_num_threads(min(count, config.NUMBA_NUM_THREADS) if _has_openmp() else 1)


@lru_cache
def _has_openmp() -> bool:
    """Without it numba has threads that end the process when two engines of it compute at once."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        log.warning("kernels run on one thread each, since numba has no OpenMP: %s", error)
        return False
    return True


floats = _view(types.float32)
"""``floats(address, count)``: an array over memory, for numba code."""

int64s = _view(types.int64)
"""The same of int64."""
