"""The memory of a pool: views, trailers, seals and checksums in the bytes where peers read them."""

from __future__ import annotations

import struct

import pytest
import torch

from kvtransfer.layout import SEAL_BYTES, TRAILER_BYTES, KVLayout, Stamp
from kvtransfer.region import Region

EPOCH = 2**64 - 2


def make_region(dtype: str = "float32", num_blocks: int = 6) -> Region:
    layout = KVLayout("w", 2, 3, 8, "rope", 4, dtype)
    return Region(layout, num_blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kv_view_is_the_span_without_its_trailer(dtype: str) -> None:
    region = make_region(dtype)
    layout = region.layout
    assert region.kv.shape == (6, *layout.shape)
    assert region.kv.dtype is getattr(torch, dtype)
    region.kv[:] = torch.arange(region.kv.numel(), dtype=region.kv.dtype).view_as(region.kv)
    for block in range(6):
        row = region.spans[block]
        assert torch.equal(row[: layout.kv_bytes].view(region.kv.dtype), region.kv[block].flatten())
        assert not row[layout.kv_bytes :].any()
    assert region.kv[0].is_contiguous()
    assert region.spans.is_contiguous()


def test_a_trailer_lies_at_the_end_of_its_span() -> None:
    region = make_region()
    region.kv.fill_(1.5)
    region.seal(EPOCH, [(4, 8), (2, 6)])
    for block, generation in ((4, 8), (2, 6)):
        trailer = bytes(region.spans[block, region.layout.kv_bytes :].numpy())
        assert len(trailer) == TRAILER_BYTES
        assert trailer == struct.pack("<QQQQ", EPOCH, block, generation, 0) + bytes(32)
        seal = bytes(region.seals[block].numpy().tobytes())
        assert len(seal) == SEAL_BYTES
        assert seal == struct.pack("<QQ", EPOCH, generation)
    assert (region.kv == 1.5).all()
    assert not region.seals[[0, 1, 3, 5]].any()
    assert region.trailers([2, 4]) == [Stamp(EPOCH, 6, 2), Stamp(EPOCH, 8, 4)]


def test_opening_a_block_touches_its_seal_only() -> None:
    region = make_region()
    region.seal(EPOCH, [(2, 6)])
    region.open(EPOCH, [(2, 7)])
    assert region.trailers([2]) == [Stamp(EPOCH, 6, 2)]
    region.staging.copy_(region.seals)
    assert region.staged_seals([2]) == [Stamp(EPOCH, 7)]


def test_what_is_expected_has_to_arrive() -> None:
    region = make_region()
    region.seal(EPOCH, [(1, 2), (2, 2)])
    region.staging.copy_(region.seals)
    region.kv.fill_(1.5)
    region.expect((2,), EPOCH, (2,), (2,))  # tuples, as a pull has them
    assert region.trailers([1, 2]) == [Stamp(EPOCH, 2, 1), Stamp(0, 0, 0)]
    assert region.staged_seals([1, 2]) == [Stamp(EPOCH, 2), Stamp(0, 0)]
    assert (region.kv == 1.5).all()
    assert region.seals[2].any()


LAST = 5
DAMAGE: dict[str, tuple[str, int, int]] = {  # tensor, row, word
    "epoch": ("trailer", 2, 0),
    "id": ("trailer", LAST, 1),
    "generation": ("trailer", 4, 2),
    "epoch in the seal": ("staging", LAST, 0),
    "generation in the seal": ("staging", 2, 1),
    "a checksum, which has to be looked at": ("trailer", 2, 3),
}


@pytest.mark.parametrize("what", ["", *DAMAGE])
def test_all_stamps_are_compared_at_once(what: str) -> None:
    region = make_region()
    expected = region.expect((4, 2, LAST), EPOCH, (8, 2**40, 6), (9, 1, 2))
    assert not region.has(expected)
    trailers = region.spans.view(torch.int64)[:, region.layout.kv_bytes // 8 :]
    for local, generation, remote in ((4, 8, 9), (2, 2**40, 1), (LAST, 6, 2)):
        trailers[local, :4] = torch.tensor([EPOCH - 2**64, remote, generation, 0])
        region.staging[local] = torch.tensor([EPOCH - 2**64, generation])
    if what:
        name, row, word = DAMAGE[what]
        (trailers if name == "trailer" else region.staging)[row, word] ^= 1 << 33
    assert region.has(expected) == (not what)


def test_nothing_to_do_is_fine() -> None:
    region = make_region()
    region.open(EPOCH, [])
    region.seal(EPOCH, [])
    assert region.has(region.expect([], EPOCH, [], []))
    assert region.trailers([]) == region.staged_seals([]) == []


def test_a_checksum_is_the_sum_of_the_words() -> None:
    region = make_region()
    words = region.layout.kv_bytes // 8
    region.spans[3] = torch.randint(0, 256, (region.span_bytes,), dtype=torch.uint8)
    data = bytes(region.spans[3, : region.layout.kv_bytes].numpy())
    expected = sum(struct.unpack(f"<{words}Q", data)) % 2**64
    assert region.checksum([3, 0]) == [expected, 0]
    region.seal(EPOCH, [(3, 2)], checksums=True)
    assert region.trailers([3]) == [Stamp(EPOCH, 2, 3, expected)]
    region.spans[3, 5] ^= 1
    assert region.checksum([3]) != [expected]


def test_a_block_that_is_not_whole_words_is_refused() -> None:
    with pytest.raises(ValueError, match="8-byte words"):
        Region(KVLayout("w", 1, 1, 1, "rope", 1, "bfloat16"), 2)
