"""Names of KV blocks: a chained hash over token ids (pure).

The engines' prefix caches and the router's prefix index call the same function, so they agree byte
for byte.
"""

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
ID_BYTES = 4  # of a packed token id


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32; raises OverflowError when one does not fit."""
    packed = array("I", ids)
    assert packed.itemsize == 4
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`; raises ValueError when the length is not a multiple of 4."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def block_hash(parent: bytes, ids: Sequence[int], block_size: int, salt: bytes) -> bytes:
    """The name of one full block: BLAKE2b-128 over (block size, salt, parent, little-endian ids).

    ``parent`` is the hash of the block before it, empty for the first one.
    """
    digest = blake2b(struct.pack("<IB", block_size, len(salt)), digest_size=HASH_BYTES)
    digest.update(salt)
    digest.update(struct.pack("<B", len(parent)) + parent)
    digest.update(pack_ids(ids))
    return digest.digest()


def block_hashes(ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """Names of all *full* blocks of ``ids``, in order; a last partial block has no name."""
    names: list[bytes] = []
    parent = b""
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = block_hash(parent, ids[start : start + block_size], block_size, salt)
        names.append(parent)
    return names


def prefix_hash(ids: Sequence[int]) -> bytes:
    """BLAKE2b-128 over all ids: binds a ticket to the exact token prefix whose KV it names."""
    return packed_prefix_hash(pack_ids(ids))


def packed_prefix_hash(packed: bytes) -> bytes:
    """:func:`prefix_hash` of ids as they travel, see :func:`pack_ids`."""
    return blake2b(packed, digest_size=HASH_BYTES).digest()
