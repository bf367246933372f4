"""A decoder-only transformer of the Llama kind, as Hugging Face names its parts.

Functions over flat tokens: ``ids`` and ``positions`` are ``[num_tokens]``, hidden states
``[num_tokens, hidden_size]``. Which optional parts a model has is data in its :class:`ModelConfig`.
Where keys and values are kept is the attention's business.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from services.engine.attention import AttentionPlan, attend, plan_attention, write_kv
from services.engine.cpu_layers import CpuLayers
from services.engine.linear import Linear, Product, product
from services.engine.model_config import ModelConfig, ModelError
from services.engine.paged_attention import PagedPlan
from services.engine.roofline import StepCosts, Weights
from services.engine.rope import frequencies, half_rotation, rotate, rotation
from services.engine.scheduler import Row

log = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Ends of names that need not be used: what can be computed, and the second name of a tied head."""


@dataclass(frozen=True)
class Layer:
    """Weights of one block; q, k, v and gate, up are stacked so that each is one product."""

    input_norm: Tensor
    qkv: Product  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]: of each query and key head
    rotated: bool
    window: int  # 0: queries see everything before them
    output: Product
    post_norm: Tensor
    gate_up: Product  # [2 * intermediate_size, hidden_size]
    down: Product


@dataclass(frozen=True)
class _Source:
    """Weights by Hugging Face name, checked and cast as they are taken."""

    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    int8: bool
    taken: set[str] = field(default_factory=set)

    def get(self, name: str, *shape: int) -> Tensor:
        """One tensor; -1 in ``shape`` stands for any size."""
        if name not in self.weights:
            raise ModelError(f"the weights lack {name!r}")
        tensor = self.weights[name]
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{name!r} is stored as {tensor.dtype}; supported: {', '.join(map(str, FLOATS))}"
            )
        found = tuple(tensor.shape)
        if len(found) != len(shape) or any(
            n not in (-1, m) for n, m in zip(shape, found, strict=True)
        ):
            raise ModelError(f"{name!r} has the shape {found}, but config.json makes it {shape}")
        self.taken.add(name)
        return tensor.to(device=self.device, dtype=self.dtype)

    def product(
        self, prefix: str, outputs: Mapping[str, int], num_inputs: int, bias: bool
    ) -> Product:
        """One product from the projections named in ``outputs``, with their numbers of outputs."""
        weight = [
            self.get(f"{prefix}.{name}_proj.weight", n, num_inputs) for name, n in outputs.items()
        ]
        added = [self.get(f"{prefix}.{name}_proj.bias", n) for name, n in outputs.items() if bias]
        return product(torch.cat(weight), torch.cat(added) if added else None, int8=self.int8)

    def middle(self, hidden: int) -> int:
        """Width of the first layer's MLP: that of all."""
        return len(self.get("model.layers.0.mlp.gate_proj.weight", -1, hidden))

    def layer(self, config: ModelConfig, index: int) -> Layer:
        """The weights of one block."""
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * dim, config.num_kv_heads * dim
        middle = config.intermediate_size or self.middle(hidden)
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qk_norm = None
        if config.qk_norm:
            q, k = (self.get(f"{attention}.{name}_norm.weight", dim) for name in "qk")
            qk_norm = torch.stack([q] * config.num_heads + [k] * config.num_kv_heads)
        return Layer(
            input_norm=self.get(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.product(
                attention, {"q": queries, "k": keys, "v": keys}, hidden, config.qkv_bias
            ),
            qk_norm=qk_norm,
            rotated=index not in config.unrotated_layers,
            window=config.window if index in config.window_layers else 0,
            output=self.product(attention, {"o": hidden}, queries, config.output_bias),
            post_norm=self.get(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.product(mlp, {"gate": middle, "up": middle}, hidden, config.mlp_bias),
            down=self.product(mlp, {"down": hidden}, middle, config.mlp_bias),
        )

    def warn_of_others(self) -> None:
        """What nobody asked for may be a part that the model should have and does not say."""
        others = sorted(n for n in self.weights.keys() - self.taken if not n.endswith(UNUSED))
        if others:
            log.warning("%d tensors are not used: %s ...", len(others), ", ".join(others[:3]))


class Model:
    """Weights and the forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
    ) -> None:
        """``weights`` by Hugging Face name; raises :class:`ModelError` when one is missing.

        ``int8``: see :class:`~services.engine.linear.PackedLinear`; for float32 on a CPU.
        """
        self.config = config
        source = _Source(weights, dtype, device, int8)
        size = config.vocab_size, config.hidden_size
        embed = source.get("model.embed_tokens.weight", *size)
        if config.tied_head:
            self.embed = self.head = product(embed, int8=int8)
        else:
            self.embed = Linear(embed)
            self.head = product(source.get("lm_head.weight", *size), int8=int8)
        self.layers: Sequence[Layer] = [source.layer(config, i) for i in range(config.num_layers)]
        self.norm = source.get("model.norm.weight", config.hidden_size)
        self.frequencies = frequencies(config, device)
        self.cpu_layers = CpuLayers(self) if CpuLayers.fits(self) else None
        source.warn_of_others()

    def first_layers(self, count: int) -> "Model":
        """A model of the first ones only, with the same weights: for timing."""
        part = copy.copy(self)
        part.layers = self.layers[:count]
        part.cpu_layers = CpuLayers(part) if self.cpu_layers is not None else None
        return part

    def step_costs(self, kv_item_bytes: int) -> StepCosts:
        """For counting; keys and values are kept in so many bytes each."""
        config = self.config
        products = [
            product
            for layer in self.layers
            for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        return StepCosts(
            layers=Weights(
                sum(product.num_weights for product in products),
                sum(product.num_bytes for product in products),
            ),
            head=Weights(self.head.num_weights, self.head.num_bytes),
            pair_flops=4 * config.num_heads * config.head_dim,
            kv_bytes=2 * config.num_kv_heads * config.head_dim * kv_item_bytes,
            windows=tuple(Counter(layer.window for layer in self.layers).items()),
        )

    def plan(self, rows: Sequence[Row], block_size: int) -> AttentionPlan | PagedPlan:
        """For :meth:`forward`; ``rows`` in :func:`~services.engine.attention.batch_order`."""
        if self.cpu_layers is not None:
            return self.cpu_layers.attention.plan(rows, block_size)
        return plan_attention(rows, block_size, self.norm.device)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: AttentionPlan | PagedPlan,
        pause: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Hidden states ``[num_tokens, hidden_size]`` after the last norm; KV goes to ``kv``.

        The plan chooses the way: with one of :func:`~services.engine.attention.plan_attention` it
        is this plain one, whatever the device. ``pause`` is called between layers, on a CPU: a GPU
        has been told all of a step before it is done with the first.
        """
        if isinstance(plan, PagedPlan):
            assert self.cpu_layers is not None
            cos, sin = half_rotation(positions, self.frequencies)
            return self.cpu_layers.run(self.embed.rows(ids), cos, sin, kv, plan, pause)
        config = self.config
        num_tokens, num_queries, dim = len(ids), config.num_heads, config.head_dim
        num_qk = num_queries + config.num_kv_heads
        eps, size = config.rms_norm_eps, (config.hidden_size,)
        cos, sin = rotation(positions, self.frequencies)
        hidden = self.embed.rows(ids)
        for index, layer in enumerate(self.layers):
            if index and hidden.device.type == "cpu":
                pause()
            x = rms_norm(hidden, size, layer.input_norm, eps)
            qkv = layer.qkv(x).view(num_tokens, -1, dim)
            qk, values = qkv[:, :num_qk], qkv[:, num_qk:]
            if layer.qk_norm is not None:
                qk = rms_norm(qk, (dim,), eps=eps) * layer.qk_norm
            if layer.rotated:
                qk = rotate(qk, cos, sin)
            write_kv(kv, index, plan, torch.stack((qk[:, num_queries:], values), 1))
            queries = qk[:, :num_queries].contiguous()
            attended = attend(kv, index, plan, queries, layer.window)
            hidden = hidden + layer.output(attended.view(num_tokens, -1))
            x = rms_norm(hidden, size, layer.post_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, -1)
            hidden = hidden + layer.down(silu(gate) * up)
        return rms_norm(hidden, size, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[num_rows, vocab_size]`` of the chosen hidden states."""
        return self.head(hidden).float()
