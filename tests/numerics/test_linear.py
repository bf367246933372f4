"""Products by packed weights against plain torch: float32 and int8, any shape, any batch."""

import pytest
import torch
from torch import Tensor

from services.engine.kernels import use_threads
from services.engine.linear import (
    GROUP,
    Linear,
    PackedLinear,
    dequantize,
    product,
    quantize,
)
from services.fetch import DEFAULT_MODEL, fetch
from tests.perplexity import load, perplexity, text_ids

SHAPES = [(16, 1), (40, 33), (48, GROUP), (50, GROUP + 1), (128, 4 * GROUP), (16, 3 * GROUP - 7)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(weight: Tensor, bias: Tensor | None, int8: bool) -> Linear:
    return Linear(dequantize(*quantize(weight)) if int8 else weight, bias)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_torchs(shape: tuple[int, int], with_bias: bool, int8: bool) -> None:
    weight = random(*shape)
    bias = random(shape[0], seed=1) if with_bias else None
    packed, plain = PackedLinear(weight, bias, int8), reference(weight, bias, int8)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 30):
        x = random(num_rows, shape[1], seed=num_rows)
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("int8", [False, True])
def test_rows_are_the_weights_themselves(int8: bool) -> None:
    weight = random(50, GROUP + 5)
    ids = torch.tensor([49, 0, 17, 17, 32])
    assert torch.equal(
        PackedLinear(weight, int8=int8).rows(ids), reference(weight, None, int8).rows(ids)
    )


def test_rows_of_x_may_lie_apart() -> None:
    weight, wide = random(32, 24), random(9, 48, seed=1)
    packed = PackedLinear(weight)
    for x in (wide[:, 8:32], wide[::2, :24], wide.T[:24].T, random(24, 9).T):
        torch.testing.assert_close(packed(x), Linear(weight)(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("int8", [False, True])
def test_a_rows_result_depends_on_no_other_row_and_on_no_thread(int8: bool) -> None:
    """Bit for bit, so that a batch, a chunk or a retry changes no token."""
    packed = PackedLinear(random(96, 200), random(96), int8)
    x = random(40, 200, seed=1)
    x[7] = float("nan")
    use_threads(2)
    together = packed(x)
    assert together[7].isnan().all()
    others = [i for i in range(40) if i != 7]
    assert together[others].isfinite().all()
    use_threads(1)
    assert torch.equal(packed(x[others]), together[others])
    # Up to six rows of int8 take another way, which rounds products by scales later.
    same = (lambda a, b: torch.allclose(a, b, atol=1e-4)) if int8 else torch.equal
    assert all(same(packed(x[i : i + 1])[0], together[i]) for i in others)
    few = packed(x[10:15])
    assert all(torch.equal(packed(x[10 + i : 11 + i])[0], few[i]) for i in range(5))


def test_int8_is_within_half_a_step() -> None:
    weight = random(20, 3 * GROUP + 10)
    weight[3] = 0
    weight[4, :GROUP] *= 1000  # hurts nobody but its own group
    steps, scale = quantize(weight)
    assert steps.dtype == torch.int8
    assert scale.shape == (20, 4)
    error = (dequantize(steps, scale) - weight).abs()
    assert (error <= scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]] * 0.501).all()
    assert steps.abs().amax() == 127
    assert (dequantize(steps, scale)[3] == 0).all()


def test_the_form_follows_the_weights() -> None:
    weight = random(16, 16)
    assert isinstance(product(weight), PackedLinear)
    assert isinstance(product(weight.double()), Linear)
    assert product(weight, int8=True).num_bytes < product(weight).num_bytes / 3


def test_int8_predicts_a_text_nearly_as_well() -> None:
    folder = fetch(DEFAULT_MODEL)
    ids = text_ids(folder, 512)
    exact, rounded = (perplexity(load(folder, int8), ids) for int8 in (False, True))
    print(f"perplexity {exact:.3f}, int8 {rounded:.3f}")
    assert rounded == pytest.approx(exact, rel=0.01)
    assert rounded != exact
