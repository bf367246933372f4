"""How KV lies in memory, and which workers may exchange it (pure).

A pool is ``num_blocks`` *spans*. A span is one block's KV, contiguous, ``[num_layers, 2,
num_kv_heads, block_size, head_dim]``, followed by a 64-byte trailer. So a transport needs one
descriptor per block for all layers, and a head slice for another tensor-parallel size is contiguous
per (layer, K or V).
"""

from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import NamedTuple

from kvtransfer.errors import LayoutMismatch

LAYOUT_VERSION = 1
TRAILER_BYTES = 64
SEAL_BYTES = 16  # u64 epoch, u64 generation
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

IDENTITY = ("weights", "num_layers", "num_kv_heads", "head_dim", "rope", "version")
FORM = ("block_size", "dtype", "tp_size")


class Stamp(NamedTuple):
    """What a trailer or a seal says: this block of this incarnation, in this generation."""

    epoch: int
    generation: int
    block_id: int = -1  # -1 in a seal, which does not hold it
    checksum: int = 0  # 0: none was computed


@dataclass(frozen=True)
class KVLayout:
    """Everything that decides the bytes of a block.

    The *identity* fields must be equal for two workers' KV to mean the same; the *form* fields must
    be equal until a converter for the difference exists.
    """

    weights: str  # sha256 of the weights: KV of other weights is another language
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str  # canonical text of the rotary parameters
    block_size: int
    dtype: str
    tp_size: int = 1
    version: int = LAYOUT_VERSION

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """``[num_layers, 2, num_kv_heads, block_size, head_dim]`` of one block."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one block's KV, without the trailer."""
        n = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n

    @property
    def span_bytes(self) -> int:
        """Bytes of one block in the pool: KV and trailer."""
        return self.kv_bytes + TRAILER_BYTES

    def fingerprint(self) -> bytes:
        """16 bytes that are equal exactly when the layouts are."""
        text = repr(sorted(asdict(self).items()))
        return blake2b(text.encode(), digest_size=16).digest()

    def check_compatible(self, other: "KVLayout") -> None:
        """Raise :class:`LayoutMismatch`, naming each differing field, unless they are equal."""
        differing = [
            f"{kind} {name}: {getattr(self, name)!r} against {getattr(other, name)!r}"
            for kind, names in (("identity", IDENTITY), ("form", FORM))
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]
        if differing:
            raise LayoutMismatch("KV layouts differ in " + "; ".join(differing))
