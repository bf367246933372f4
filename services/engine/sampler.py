"""Chooses the next token of each row of a step, all rows in one call.

The tokens are those of :mod:`services.engine.sampler_reference`, which says what they are. This is
about not looking at most of them. Each block of ``BLOCK`` logits is known by its best, so a pass
with a lower bound skips blocks; noise is bounded, so that no token far below the best score so far
needs any; and a cut (top-k, top-p) is found by selection, without sorting.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numba import njit, prange
from numba.extending import register_jitable
from torch import Tensor

from services.engine.compiled import compiled
from services.engine.scheduler import NO_TOKEN, Row

BLOCK = 64  # logits; a multiple of the four that share a Philox counter
UNIT_BITS = 30
"""A best token weighs ``2**UNIT_BITS``. 2**18 of them add up to what a double holds exactly."""

LIGHTEST = np.float32(-UNIT_BITS - 0.25)
"""As a power of two: less than one unit, which is nothing."""

# Of Philox.
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP0, _STEP1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
# Of log.
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
_LN2 = math.log(2)
# Of weigh.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_TO_WHOLE = np.float32(1.5 * 2**23)
_TO_EXPONENT = np.int32(UNIT_BITS + 127 - 0x4B400000)  # which are the bits of _TO_WHOLE
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(_LN2**n / math.factorial(n)) for n in range(7))
_GROUPS = BLOCK // 4
_AT_ONCE = 16  # blocks
_MAX_NOISE = 22.9
_BAND = np.float32(3)  # of weights within a factor of eight
_NEGATIVE = np.float32(-np.inf)
# Of infinities, as integers in the order of floats.
_HIGHEST, _LOWEST = np.int32(0x7F800000), np.int32(0x7F800000 ^ -1)


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token per row, or NO_TOKEN; ``logits`` is ``[num_rows, vocab_size]``, float32 or less."""
    if logits.device.type != "cpu" and all(_is_argmax(row) for row in rows):
        finite = logits.amax(-1).isfinite()
        tokens: list[int] = logits.argmax(-1).where(finite, NO_TOKEN).tolist()
        return tokens
    host = logits.float().cpu().contiguous().numpy()
    masked: list[int] = []
    numbers, factors = [], []
    for row in rows:
        params = row.params
        first = len(masked)
        if masks_stop_ids(row):
            masked += params.stop_ids
        numbers.append((params.seed, params.choice, row.end, params.top_k, first, len(masked)))
        scale = scale_of(params.temperature) if params.temperature else 0.0
        floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
        factors.append((scale, weight_scale(scale), params.top_p, floor))
    chosen = np.empty(len(rows), np.int64)
    _sample_rows(
        host,
        np.array(numbers, np.uint64),
        np.array(factors, np.float64),
        np.array(masked, np.int64),
        chosen,
    )
    return chosen.tolist()


def _is_argmax(row: Row) -> bool:
    return row.params.temperature == 0 and not masks_stop_ids(row)


def masks_stop_ids(row: Row) -> bool:
    """Whether the answer is still too short to end."""
    return bool(row.params.stop_ids) and row.end - row.num_prompt < row.params.min_tokens


def scale_of(temperature: float) -> float:
    """What logits are multiplied with. Finite, since 0 times infinity is not a number."""
    return min(1 / temperature, sys.float_info.max)


def weight_scale(scale: float) -> np.float32:
    """The same in powers of two, for what :func:`weigh` takes."""
    return np.float32(min(max(scale / _LN2, _SMALLEST), _LARGEST))


# --- functions of numbers: of scalars in kernels, of arrays in the reference ----------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _called(function: _Function) -> _Function:
    """Let kernels call it too."""
    known: _Function = register_jitable(function)
    return known


def _inlined(function: _Function) -> _Function:
    """The same, inlined by numba: LLVM inlines when it is too late for vectors."""
    known: _Function = register_jitable(inline="always")(function)
    return known


@_inlined
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: four u32 words of a counter and a key of two, all held in u64."""
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HIGH) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HIGH) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _STEP0) & _LOW
        k1 = (k1 + _STEP1) & _LOW
    return c0, c1, c2, c3


@_called
def log(x: Any) -> Any:
    """The natural logarithm of positive, normal doubles, within a few units of the last place."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - _SQRT_HALF) >> 52
    mantissa = np.int64(bits - (exponent << 52)).view(np.float64)  # from sqrt(1/2) to sqrt(2)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # log(mantissa) = 2 atanh(s)
    z = s * s
    series = 1 / 17 + z * (1 / 19 + z * (1 / 21))
    series = 1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15 + z * series)))
    series = 1 / 3 + z * (1 / 5 + z * (1 / 7 + z * series))
    return exponent * _LN2 + (2.0 * s + 2.0 * s * (z * series))


@_called
def gumbel(word: Any) -> Any:
    """Standard Gumbel noise of a random u32: between -3.2 and 22.9, rising with the word."""
    uniform = (np.float64(word) + 0.5) * 2.0**-32  # never 0 or 1
    return -log(-log(uniform))


@_inlined
def weigh(t: Any) -> Any:
    """``2**t`` in units, cut to i32, for float32 from LIGHTEST to 0: a scaled logit's distance from
    the best, see :func:`weight_scale`. The relative error is below 1e-6.

    It is 2**whole * 2**part: the first are bits of a float, the second a series of its logarithm.
    """
    shifted = t + _TO_WHOLE  # in the last bits of this is t, rounded
    part = t - (shifted - _TO_WHOLE)
    whole = np.int32((np.float32(shifted).view(np.int32) + _TO_EXPONENT) << 23).view(np.float32)
    series = _C3 + part * (_C4 + part * (_C5 + part * _C6))
    return np.int32((_C0 + part * (_C1 + part * (_C2 + part * series))) * whole)


# --- kernels --------------------------------------------------------------------------------------


@njit
def _find_bests(x, bests):  # type: ignore[no-untyped-def]
    """The best of each block, and of all; NaN when there is one.

    By integers in the order of the floats that have the same bits: a maximum of floats makes no
    vector instructions, since NaN has no place among them. Among integers it has, at both ends.
    """
    bits, order = x.view(np.int32), bests.view(np.int32)
    lowest, highest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(len(bests)):
        best = np.int32(-0x80000000)
        for i in range(b * BLOCK, min(b * BLOCK + BLOCK, len(x))):
            place = np.int32(bits[i] ^ ((bits[i] >> 31) & np.int32(0x7FFFFFFF)))
            best = max(best, place)
            lowest = min(lowest, place)
        highest = max(highest, best)
        order[b] = best ^ ((best >> 31) & np.int32(0x7FFFFFFF))
    if lowest < _LOWEST or highest > _HIGHEST:
        return np.float32(np.nan)
    summit = bests[0]
    for best in bests:
        summit = max(summit, best)
    return summit


@njit
def _first_of(x, bests, value):  # type: ignore[no-untyped-def]
    """Where the best of all is first."""
    for b in range(len(bests)):
        if bests[b] == value:
            for i in range(b * BLOCK, min(b * BLOCK + BLOCK, len(x))):
                if x[i] == value:
                    return i
    return -1


@njit
def _kth(x, bests, k):  # type: ignore[no-untyped-def]
    """The k-th largest logit. As many blocks have a best that is at least the k-th best of them,
    so no logit below that is looked at.
    """
    bound = _NEGATIVE
    if k <= len(bests):
        bound = _select(bests.copy(), np.ones(len(bests), np.int32), len(bests), 0, float(k))
    values = np.empty(len(x), np.float32)
    count = 0
    for b in range(len(bests)):
        if bests[b] >= bound:
            for i in range(b * BLOCK, min(b * BLOCK + BLOCK, len(x))):
                if x[i] >= bound:
                    values[count] = x[i]
                    count += 1
    return _select(values, np.ones(count, np.int32), count, 0, float(k))


@njit
def _nucleus(x, bests, summit, scale, top_p, cut):  # type: ignore[no-untyped-def]
    """The smallest logit of those that have less than ``top_p`` of the weight above them; weights
    are of logits from ``cut`` on. Looked for in bands, from above.
    """
    needed = top_p * _mass(x, bests, summit, scale, cut)
    values, weights = np.empty(len(x), np.float32), np.empty(len(x), np.int32)
    above = np.int64(0)
    high, low = np.float32(1), -_BAND  # of t in :func:`weigh`
    while True:
        count, inside = 0, np.int64(0)
        for b in range(len(bests)):
            if bests[b] < cut or (bests[b] - summit) * scale < low:
                continue
            for i in range(b * BLOCK, min(b * BLOCK + BLOCK, len(x))):
                t = (x[i] - summit) * scale
                if low <= t < high and x[i] >= cut:
                    values[count], weights[count] = x[i], weigh(max(t, LIGHTEST))
                    inside += weights[count]
                    count += 1
        if above + inside >= needed:
            return _select(values, weights, count, above, needed)
        above += inside
        high, low = low, low - _BAND


@njit
def _mass(x, bests, summit, scale, cut):  # type: ignore[no-untyped-def]
    """The weight of all logits from ``cut`` on."""
    weights = np.empty(_AT_ONCE * BLOCK, np.int32)
    mass = np.int64(0)
    end = 0
    while end < len(bests):
        first, end = _run(bests, end, summit, scale, LIGHTEST, cut)
        part = x[first * BLOCK : end * BLOCK]
        for i in range(len(part)):  # apart from the sum: these are vectors of floats
            t = (part[i] - summit) * scale
            weight = weigh(t if t > LIGHTEST else LIGHTEST)
            weights[i] = weight if part[i] >= cut else np.int32(0)
        for i in range(len(part)):
            mass += weights[i]
    return mass


@njit
def _run(bests, first, summit, scale, lowest, cut):  # type: ignore[no-untyped-def]
    """The next blocks in a row, a few, whose best is from ``cut`` on and scaled from ``lowest`` on:
    the first of them, and the one behind the last.
    """
    while first < len(bests) and not (
        bests[first] >= cut and (bests[first] - summit) * scale >= lowest
    ):
        first += 1
    end = first
    while end < min(first + _AT_ONCE, len(bests)) and (
        bests[end] >= cut and (bests[end] - summit) * scale >= lowest
    ):
        end += 1
    return first, end


@njit
def _select(values, weights, count, above, needed):  # type: ignore[no-untyped-def]
    """The largest value such that ``above`` and the weights of all from it on reach ``needed``,
    which those of all do. Changes the arrays' order: a quickselect.
    """
    first, end = 0, count
    while True:
        a, b, c = values[first], values[(first + end) // 2], values[end - 1]
        pivot = max(min(a, b), min(max(a, b), c))
        greater, equal, lesser = first, first, end  # where each part ends, or begins
        more, same = np.int64(0), np.int64(0)
        while equal < lesser:
            value, weight = values[equal], weights[equal]
            if value < pivot:
                lesser -= 1
                values[equal], weights[equal] = values[lesser], weights[lesser]
                values[lesser], weights[lesser] = value, weight
                continue
            if value > pivot:
                values[equal], weights[equal] = values[greater], weights[greater]
                values[greater], weights[greater] = value, weight
                greater += 1
                more += weight
            else:
                same += weight
            equal += 1
        if greater > first and above + more >= needed:
            end = greater
        elif above + more + same >= needed or lesser == end:
            return pivot
        else:
            above += more + same
            first = lesser


@njit
def _winner(x, bests, summit, scale, cut, floor, numbers):  # type: ignore[no-untyped-def]
    """The token with the highest score of those from ``cut`` and the scaled ``floor`` on."""
    summit = np.float64(summit)
    words = np.empty((4, _AT_ONCE * _GROUPS), np.uint32)
    winner = _first_of(x, bests, summit)
    _draw(numbers, winner // BLOCK, 1, words)
    score = gumbel(words[winner % 4, winner % BLOCK // 4])
    end = 0
    while end < len(bests):
        lowest = max(floor, score - _MAX_NOISE)
        first, end = _run(bests, end, summit, scale, lowest, cut)
        _draw(numbers, first, end - first, words)
        for b in range(first, end):
            # Noise is at most -log(1 - uniform): this is how close to its end a word has to be.
            odds = math.exp(min((bests[b] - summit) * scale - score, 0.0))
            needed = np.int64(0xFFFFFFFF) - np.int64(odds * 2.0**32 * 1.001 + 1)
            if _highest(words, b - first) < needed:
                continue
            for i in range(b * BLOCK, min(b * BLOCK + BLOCK, len(x))):
                word = words[i % 4, i // 4 - first * _GROUPS]
                scaled = (x[i] - summit) * scale
                if word >= needed and x[i] >= cut and scaled >= floor:
                    new = scaled + gumbel(word)
                    if new > score or (new == score and i < winner):
                        winner, score = i, new
    return winner


@njit
def _draw(numbers, first, count, words):  # type: ignore[no-untyped-def]
    """The random words of some blocks, that of their token ``4 j + i`` at ``[i, j]``.

    That all is below 2**32 is said to the compiler, which then multiplies in vectors.
    """
    seed, choice, position = numbers[0], numbers[1] & _LOW, numbers[2] & _LOW
    low, high = seed & _LOW, seed >> _HIGH
    for j in range(count * _GROUPS):
        group = np.uint64(first * _GROUPS + j) & _LOW
        drawn = philox(group, position, choice, np.uint64(0), low, high)
        words[0, j], words[1, j], words[2, j], words[3, j] = drawn


@njit
def _highest(words, block):  # type: ignore[no-untyped-def]
    """Of the words of one block."""
    highest = np.uint32(0)
    for i in range(4):
        for j in range(block * _GROUPS, block * _GROUPS + _GROUPS):
            highest = max(highest, words[i, j])
    return np.int64(highest)


@njit
def _sample_row(x, numbers, factors, masked):  # type: ignore[no-untyped-def]
    scale, weight_scale, top_p, floor = factors[0], np.float32(factors[1]), factors[2], factors[3]
    top_k = np.int64(numbers[3])
    bests = np.empty((len(x) + BLOCK - 1) // BLOCK, np.float32)
    summit = _find_bests(x, bests)
    if len(masked) and np.isfinite(summit):
        x = x.copy()
        for token in masked:
            if token < len(x):
                x[token] = _NEGATIVE
        summit = _find_bests(x, bests)
    if not np.isfinite(summit):
        return NO_TOKEN
    if scale == 0:
        return _first_of(x, bests, summit)
    cut = _NEGATIVE
    if 0 < top_k < len(x):
        cut = _kth(x, bests, top_k)
    if top_p < 1:
        cut = _nucleus(x, bests, summit, weight_scale, top_p, cut)
    return _winner(x, bests, summit, scale, cut, floor, numbers)


@compiled(
    "void(float32[:, ::1], uint64[:, ::1], float64[:, ::1], int64[::1], int64[::1])", parallel=True
)
def _sample_rows(logits, numbers, factors, masked, chosen):  # type: ignore[no-untyped-def]
    for r in prange(len(logits)):
        first, end = np.int64(numbers[r, 4]), np.int64(numbers[r, 5])
        chosen[r] = _sample_row(logits[r], numbers[r], factors[r], masked[first:end])
