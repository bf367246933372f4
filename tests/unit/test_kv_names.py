"""Names of blocks, layouts and tickets: what two workers must agree on byte for byte."""

import dataclasses
import hmac

import pytest
from hypothesis import given, strategies as st

from kvtransfer.errors import LayoutMismatch, TicketError
from kvtransfer.hashing import block_hash, block_hashes, pack_ids, prefix_hash, unpack_ids
from kvtransfer.layout import SEAL_BYTES, TRAILER_BYTES, KVLayout
from kvtransfer.ticket import Hmac, Ticket, open_ticket

LAYOUT = KVLayout(
    weights="ab" * 32,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    rope="theta=100000",
    block_size=16,
    dtype="float32",
)

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


# --- hashing ---


@given(IDS)
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_ids_that_cannot_be_packed() -> None:
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_ids([wrong])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"12345")


@given(IDS, st.integers(1, 20))
def test_only_full_blocks_have_names(ids: list[int], block_size: int) -> None:
    names = block_hashes(ids, block_size)
    assert len(names) == len(ids) // block_size
    assert len(set(names)) == len(names)  # chained: equal contents at two places differ
    assert all(len(name) == 16 for name in names)


@given(IDS, IDS)
def test_a_name_tells_the_whole_prefix(ids: list[int], other: list[int]) -> None:
    common = 0
    while common < min(len(ids), len(other)) and ids[common] == other[common]:
        common += 1
    ours, theirs = block_hashes(ids, 4), block_hashes(other, 4)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        assert (a == b) == ((index + 1) * 4 <= common)


def test_a_name_depends_on_all_its_parts() -> None:
    ids = list(range(16))
    names = {
        block_hash(b"", ids, 16, b""),
        block_hash(b"", ids, 32, b""),
        block_hash(b"", ids, 16, b"tenant"),
        block_hash(b"p" * 16, ids, 16, b""),
        block_hash(b"", ids[::-1], 16, b""),
        block_hash(b"tenant", ids, 16, b""),  # a parent is not a salt
    }
    assert len(names) == 6
    assert prefix_hash(ids) != prefix_hash(ids[:-1])


def test_names_are_stable_across_versions() -> None:
    # Workers and routers of different builds compare these: a change must bump LAYOUT_VERSION.
    assert block_hashes(list(range(4)), 2)[1].hex() == "f3c488b4ad8b459e9c13c0ccda10651b"
    assert prefix_hash([1, 2, 3]).hex() == "b30a3c159d7e8193559a42a84f1fcae1"


# --- layout ---


def test_sizes_of_the_default_model() -> None:
    assert LAYOUT.shape == (30, 2, 3, 16, 64)
    assert LAYOUT.kv_bytes == 30 * 2 * 3 * 16 * 64 * 4
    assert LAYOUT.span_bytes == LAYOUT.kv_bytes + TRAILER_BYTES
    assert dataclasses.replace(LAYOUT, dtype="bfloat16").kv_bytes * 2 == LAYOUT.kv_bytes
    assert SEAL_BYTES == 16


def test_equal_layouts_are_compatible() -> None:
    twin = dataclasses.replace(LAYOUT)
    LAYOUT.check_compatible(twin)
    assert LAYOUT.fingerprint() == twin.fingerprint()
    assert len(LAYOUT.fingerprint()) == 16


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("identity", "weights", "cd" * 32),
        ("identity", "num_layers", 31),
        ("identity", "num_kv_heads", 1),
        ("identity", "head_dim", 128),
        ("identity", "rope", "theta=10000"),
        ("identity", "version", 2),
        ("form", "block_size", 32),
        ("form", "dtype", "bfloat16"),
        ("form", "tp_size", 2),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(kind: str, name: str, value: object) -> None:
    other = dataclasses.replace(LAYOUT, **{name: value})
    assert other.fingerprint() != LAYOUT.fingerprint()
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.check_compatible(other)
    assert f"{kind} {name}: {getattr(LAYOUT, name)!r} against {value!r}" in str(caught.value)


def test_all_differences_are_told_at_once() -> None:
    other = dataclasses.replace(LAYOUT, weights="x", block_size=8)
    with pytest.raises(LayoutMismatch, match=r"weights.*block_size"):
        LAYOUT.check_compatible(other)


# --- ticket ---

TICKET = Ticket(
    ticket_id=b"i" * 16,
    worker_id="prefill-0",
    epoch=2**64 - 1,
    block_ids=(5, 1, 9),
    generations=(2, 2**63, 4),
    fingerprint=LAYOUT.fingerprint(),
    num_tokens=40,
    prefix=prefix_hash(range(40)),
)


def test_a_ticket_survives_the_wire() -> None:
    assert open_ticket(TICKET.sign(b"secret"), b"secret") == TICKET


@given(st.binary(max_size=200), st.lists(st.binary(max_size=300), max_size=3))
def test_the_signature_is_hmac_sha256(secret: bytes, messages: list[bytes]) -> None:
    ours = Hmac(secret)
    for message in messages:
        assert ours.digest(message) == hmac.digest(secret, message, "sha256")


def test_a_ticket_of_another_deployment_is_refused() -> None:
    with pytest.raises(TicketError, match="signature"):
        open_ticket(TICKET.sign(b"secret"), b"other")


def test_every_changed_byte_is_noticed() -> None:
    packed = TICKET.sign(b"secret")
    for place in range(len(packed)):
        forged = bytearray(packed)
        forged[place] ^= 1
        with pytest.raises(TicketError):
            open_ticket(bytes(forged), b"secret")


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TicketError):
        open_ticket(data, b"secret")


def test_a_cut_or_longer_ticket_is_refused() -> None:
    packed = TICKET.sign(b"secret")
    for wrong in (packed[:-1], packed[:20], b"", packed + b"x"):
        with pytest.raises(TicketError):
            open_ticket(wrong, b"secret")


def test_one_generation_per_block() -> None:
    wrong = dataclasses.replace(TICKET, generations=(2,))
    with pytest.raises(TicketError, match="generation"):
        open_ticket(wrong.sign(b"secret"), b"secret")
