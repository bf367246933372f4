"""All layers in one compiled call, against the plain forward pass of the same model."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.engine.attention import plan_attention
from services.engine.compiled import KERNELS, compile_all
from services.engine.kernels import use_threads
from services.engine.linear import product
from services.engine.model import Model
from services.engine.model_config import ModelConfig, ModelError
from services.engine.sampler import sample
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams
from services.engine.weights import random_weights

CPU = torch.device("cpu")
BLOCK = 16
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
SHAPE = ModelConfig(
    num_layers=3,
    hidden_size=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    vocab_size=100,
    max_model_len=1024,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tied_head=True,
    unrotated_layers=(1,),
    window=40,
    window_layers=(2,),
    qkv_bias=True,
    qk_norm=True,
)


def model(shape: ModelConfig = SHAPE, middle: int = 72, int8: bool = False) -> Model:
    """One with every optional part, none of which does nothing."""
    weights = random_weights(shape, middle, seed=5)
    generator = torch.Generator().manual_seed(6)
    for i in range(shape.num_layers):
        attention = f"model.layers.{i}.self_attn"
        for name, heads in (("q", 6), ("k", 2), ("v", 2)):
            size = heads * shape.head_dim
            weights[f"{attention}.{name}_proj.bias"] = torch.randn(size, generator=generator)
            weights[f"{attention}.{name}_norm.weight"] = torch.rand(
                shape.head_dim, generator=generator
            )
        del weights[f"{attention}.v_norm.weight"]
    return Model(shape, weights, torch.float32, CPU, int8)


class Pool:
    """KV memory, and sequences that lie scattered in it."""

    def __init__(self, shape: ModelConfig = SHAPE) -> None:
        layout = KVLayout(
            "", shape.num_layers, shape.num_kv_heads, shape.head_dim, "", BLOCK, "float32"
        )
        self.region = Region(layout, 64)
        self.region.kv.fill_(float("nan"))  # what nobody wrote must not be read
        self._free = torch.randperm(63, generator=torch.Generator().manual_seed(1)).add(1).tolist()

    def row(self, num_tokens: int, start: int = 0, blocks: tuple[int, ...] = ()) -> Row:
        """The next ``num_tokens`` of a sequence; ``blocks`` has those that it has already."""
        while len(blocks) * BLOCK < start + num_tokens:
            blocks = (*blocks, self._free.pop())
        ids = tuple((7 * (start + i) + blocks[0]) % 100 for i in range(num_tokens))
        return Row((bytes([blocks[0]]), 0), ids, start, blocks, True, PARAMS, num_tokens)

    def run(self, model: Model, rows: list[Row], plain: bool = False) -> list[Tensor]:
        """Hidden states of each row."""
        ids = torch.tensor([token for row in rows for token in row.ids])
        positions = torch.tensor([p for row in rows for p in range(row.start, row.end)])
        plan = plan_attention(rows, BLOCK, CPU) if plain else model.plan(rows, BLOCK)
        hidden = model.forward(ids, positions, self.region.kv, plan)
        return list(hidden.split([len(row.ids) for row in rows]))


@pytest.fixture(autouse=True)
def threads() -> None:
    use_threads(2)


@pytest.mark.parametrize("int8", [False, True])
def test_as_the_plain_pass(int8: bool) -> None:
    ours = model(int8=int8)
    assert ours.cpu_layers is not None
    results, caches = [], []
    for plain in (False, True):
        pool = Pool()
        if plain:
            pool.region.kv.zero_()  # this one gives what it should not see a weight of zero
        prompts = [pool.row(n) for n in (90, 33, 1, 300)]
        first = pool.run(ours, prompts, plain)
        again = [pool.row(1, row.end, row.blocks) for row in prompts]
        again.append(pool.row(20))
        results.append([*first, *pool.run(ours, again, plain)])
        caches.append(pool.region.kv.nan_to_num())
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)


def test_a_sequence_does_not_depend_on_its_company_or_on_threads() -> None:
    """Bit for bit: neither a batch nor the number of threads changes a token."""
    ours = model()
    pool = Pool()
    prompts = [pool.row(n) for n in (90, 33, 1, 130)]
    together = pool.run(ours, prompts)
    decodes = [pool.row(1, row.end, row.blocks) for row in prompts]
    decoded = pool.run(ours, decodes)
    use_threads(1)
    for i in range(4):
        assert torch.equal(pool.run(ours, [prompts[i]])[0], together[i])
        assert torch.equal(pool.run(ours, [decodes[i]])[0], decoded[i])
    mixed = pool.run(ours, [decodes[0], prompts[1], decodes[3]])
    for got, expected in zip(mixed, (decoded[0], together[1], decoded[3]), strict=True):
        assert torch.equal(got, expected)


def test_a_prompt_does_not_depend_on_how_it_is_cut() -> None:
    """Bit for bit as well: in one chunk, in several, and token by token."""
    ours = model()
    whole_pool, pool = Pool(), Pool()
    whole = whole_pool.run(ours, [whole_pool.row(90)])[0]
    pieces, start, blocks = [], 0, pool.row(90).blocks
    for size in (7, 1, 1, 40, 1, 16, 1, 23):
        pieces += pool.run(ours, [pool.row(size, start, blocks)])
        start += size
    assert start == 90
    assert torch.equal(torch.cat(pieces), whole)


def test_the_first_layers_are_a_model_of_their_own() -> None:
    ours = model()
    fewer = model(replace(SHAPE, num_layers=2, window_layers=()))
    pool, other = Pool(), Pool(replace(SHAPE, num_layers=2))
    row = pool.row(30)
    assert torch.equal(
        pool.run(ours.first_layers(2), [row])[0], other.run(fewer, [other.row(30)])[0]
    )
    assert not torch.equal(pool.run(ours, [row])[0], pool.run(ours.first_layers(2), [row])[0])


def test_a_step_calls_what_was_compiled_before() -> None:
    """Otherwise it would compile for half a minute in the middle of serving."""
    compile_all()
    before = {kernel.__name__: kernel.signatures for kernel, _ in KERNELS}
    assert set(before) >= {"_run", "multiply", "multiply_int8", "_list_items", "_sample_rows"}
    for int8 in (False, True):
        ours = model(int8=int8)
        pool = Pool()
        rows = [pool.row(40), pool.row(1)]
        hidden = pool.run(ours, rows)
        logits = ours.logits(torch.stack([part[-1] for part in hidden]))
        sample(
            logits,
            [
                replace(row, params=replace(PARAMS, temperature=t))
                for row, t in zip(rows, (0.0, 0.7), strict=True)
            ],
        )
    assert {kernel.__name__: kernel.signatures for kernel, _ in KERNELS} == before


CALLS = """
import torch
from services.engine.compiled import KERNELS
from services.engine.linear import PackedLinear
for int8 in (False, True):
    PackedLinear(torch.ones(16, 16), int8=int8)(torch.ones(2, 16))
print([sum(kernel.stats.cache_misses.values()) for kernel, _ in KERNELS])
print([sum(kernel.stats.cache_hits.values()) for kernel, _ in KERNELS])
"""


def test_another_process_finds_what_was_compiled() -> None:
    compile_all()
    command = [sys.executable, "-c", CALLS]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    misses, hits = (json.loads(line) for line in said.splitlines())
    assert sum(misses) == 0
    assert sum(hits) == 2


def test_what_does_not_fit_takes_the_plain_way() -> None:
    assert model(middle=70).cpu_layers is None  # not whole vectors
    assert model(replace(SHAPE, head_dim=20)).cpu_layers is None
    pool = Pool(replace(SHAPE, head_dim=20))
    pool.region.kv.zero_()
    assert pool.run(model(replace(SHAPE, head_dim=20)), [pool.row(5)])[0].isfinite().all()


@pytest.mark.parametrize("wrong", ["gate", "up", "down"])
@pytest.mark.parametrize("told", [0, 72])
def test_an_mlp_of_another_width_is_refused(wrong: str, told: int) -> None:
    """Kernels go by one width for all layers: they would read beyond the weights."""
    shape = replace(SHAPE, intermediate_size=told, qkv_bias=False, qk_norm=False)
    weights = random_weights(shape, 72, seed=5)
    name = f"model.layers.1.mlp.{wrong}_proj.weight"
    size = (64, 64)
    weights[name] = torch.ones(*size)
    with pytest.raises(ModelError, match=name):
        Model(shape, weights, torch.float32, CPU)


def test_a_product_checks_its_inputs() -> None:
    with pytest.raises(ValueError, match="8 inputs for weights of 16"):
        product(torch.ones(16, 16))(torch.ones(1, 8))
