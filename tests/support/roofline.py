"""How many operations and bytes a step needs, and how fast it could be at best (pure).

A multiply-add is two operations. Counted is what no implementation can do without: the products
with weight matrices, one row of the head for each token that is sampled, and attention of each
query over what it may see, itself included. Norms, rotary embedding, softmax and sampling are not.
Bytes are each weight once, and the keys and values that are read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INT8_GROUP = 64  # services.engine.linear.GROUP


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From a ``config.json``."""
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """``(inputs, outputs)`` of one layer's products, those that share an input together."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return [
            (self.hidden, qkv),
            (self.num_heads * self.head_dim, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices."""
        return sum(inputs * outputs for inputs, outputs in self.matrices)

    @property
    def num_scales(self) -> int:
        """Of int8 weights: one for each output and ``INT8_GROUP`` inputs, or what is left."""
        layer = sum(-(-inputs // INT8_GROUP) * outputs for inputs, outputs in self.matrices)
        return self.num_layers * layer + -(-self.hidden // INT8_GROUP) * self.vocab

    def attention_flops(self, pairs: int) -> int:
        """Of all layers; ``pairs`` of a query and a key that it sees."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * pairs

    def kv_bytes(self, num_tokens: int, item_bytes: int = 4) -> int:
        """Keys and values of so many tokens, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_tokens * item_bytes

    def weight_bytes(self, int8: bool = False) -> int:
        """What each step reads of the matrices and the head: float32, or int8 and scales."""
        count = self.num_layers * self.layer_weights + self.hidden * self.vocab
        return count + 4 * self.num_scales if int8 else 4 * count


SMOLLM = Shape.of(
    {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
)
"""The default model."""


def prefill_flops(shape: Shape, num_tokens: int) -> int:
    """Of a whole prompt, after which one token is sampled."""
    linear = 2 * num_tokens * shape.num_layers * shape.layer_weights
    head = 2 * shape.hidden * shape.vocab
    return linear + head + shape.attention_flops(num_tokens * (num_tokens + 1) // 2)


def decode_flops(shape: Shape, batch: int, context: float) -> float:
    """Of one token for each of ``batch`` sequences, that see ``context`` tokens before it."""
    weights = shape.num_layers * shape.layer_weights + shape.hidden * shape.vocab
    return 2 * batch * weights + shape.attention_flops(1) * batch * (context + 1)


def decode_bytes(shape: Shape, batch: int, context: float, int8: bool = False) -> float:
    """Read and written by the same step."""
    return shape.weight_bytes(int8) + shape.kv_bytes(1) * batch * (context + 1)


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do."""

    flops_s: float
    bytes_s: float


def decode_roof_s(
    shape: Shape, batch: int, context: float, ceilings: Ceilings, int8: bool = False
) -> float:
    """Seconds below which no decode step can be: that of its bytes or of its operations."""
    by_memory = decode_bytes(shape, batch, context, int8) / ceilings.bytes_s
    return max(by_memory, decode_flops(shape, batch, context) / ceilings.flops_s)


def prefill_share(shape: Shape, num_tokens: int, seconds: float, ceilings: Ceilings) -> float:
    """Model-FLOPs utilisation: what was needed, by what the machine could have done."""
    return prefill_flops(shape, num_tokens) / seconds / ceilings.flops_s
