"""The real engine and model against a loop that recomputes everything, and against transformers.

An answer is judged token by token (teacher forcing): a token is right if its score is within 1e-3
of the best one, since logits differ by rounding between batch shapes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.engine.attention import plan_attention
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.model import Model
from services.engine.model_config import ModelError, read_config
from services.engine.runner import ModelRunner
from services.engine.sampler_reference import scores
from services.engine.scheduler import Output, Row
from services.engine.sequence import Key, SamplingParams
from services.engine.weights import random_weights, read_weights
from tests.support.tiny_model import INTERMEDIATE, SHAPE, save_model

CPU = torch.device("cpu")
BLOCK = 16
WEIGHTS = random_weights(SHAPE, INTERMEDIATE, seed=1)
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33]
EPOCH = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the naive side: dense, no cache, nothing shared with the engine but the weights ---


def naive_logits(ids: list[int], weights: dict[str, Tensor] = WEIGHTS) -> Tensor:
    """``[len(ids), vocab_size]``, computed from all ids at once."""
    n, dim = len(ids), SHAPE.head_dim
    share = SHAPE.num_heads // SHAPE.num_kv_heads
    frequencies = SHAPE.rope_theta ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(n).float()[:, None] * frequencies

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + SHAPE.rms_norm_eps).rsqrt() * weights[name]

    def rotate(x: Tensor) -> Tensor:  # [n, heads, dim]: pairs (i, i + dim / 2) turn by the angle
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    causal = torch.full((n, n), float("-inf")).triu(1)
    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(SHAPE.num_layers):
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm.weight")
        q, k, v = (
            (y @ weights[f"{p}self_attn.{name}_proj.weight"].T).view(n, -1, dim) for name in "qkv"
        )
        q, k = rotate(q), rotate(k).repeat_interleave(share, 1)
        v = v.repeat_interleave(share, 1)
        attention = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5 + causal
        y = torch.einsum("hqk,khd->qhd", attention.softmax(-1), v).reshape(n, -1)
        x = x + y @ weights[p + "self_attn.o_proj.weight"].T
        y = norm(x, p + "post_attention_layernorm.weight")
        gate = y @ weights[p + "mlp.gate_proj.weight"].T
        up = y @ weights[p + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[p + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def check_answer(ids: list[int], answer: list[int], params: SamplingParams) -> None:
    """Each token is the best, or as good as it, given those before it."""
    logits = naive_logits(ids + answer)
    for i, token in enumerate(answer):
        end = len(ids) + i
        row = Row((b"", 0), (0,), end - 1, (), True, params, len(ids))
        values = scores(logits[end - 1], row)
        gap = (values.max() - values[token]).item()
        assert gap < 1e-3, f"token {i} of {len(ids)} ids: {token} is {gap} below the best"


# --- the engine ---


def make_engine(
    blocks: int = 65,
    budget: int = 64,
    seqs: int = 16,
    prefix_cache: bool = True,
    block_size: int = BLOCK,
    chunks: int = 0,
) -> Engine:
    layout = KVLayout(
        "w", SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim, SHAPE.rope, block_size, "float32"
    )
    model = Model(SHAPE, WEIGHTS, torch.float32, CPU)
    config = EngineConfig(
        kv_blocks=blocks,
        block_size=block_size,
        max_model_len=SHAPE.max_model_len,
        max_num_seqs=seqs,
        token_budget=budget,
        chunk_budget=chunks,
        prefix_cache=prefix_cache,
    )
    return Engine(config, ModelRunner(model, Region(layout, blocks), EPOCH))


def book(tokens: dict[Key, list[int]], outputs: list[Output]) -> None:
    for output in outputs:
        tokens.setdefault(output.key, []).append(output.token)


def run(engine: Engine, tokens: dict[Key, list[int]] | None = None) -> dict[Key, list[int]]:
    """Step until there is no work; all tokens by sequence."""
    tokens = {} if tokens is None else tokens
    for _ in range(3000):
        if not engine.has_work:
            return tokens
        book(tokens, engine.step(1.0))
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(length * 1000 + seed)
    return [chance.randrange(SHAPE.vocab_size) for _ in range(length)]


GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.95, seed=1 << 63)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [1, 7, 16, 100])
def test_any_chunking_gives_the_naive_answer(budget: int, params: SamplingParams) -> None:
    for length in LENGTHS:
        engine = make_engine(budget=budget)
        ids = prompt(length)
        engine.add((b"a", 0), ids, length, params)
        answer = run(engine)[b"a", 0]
        assert len(answer) == params.max_tokens
        check_answer(ids, answer, params)
        assert engine.scheduler.stats.computed_prompt_tokens == length


@pytest.mark.parametrize(("budget", "chunks"), [(5, 0), (64, 0), (20, 3)])
def test_a_batch_gives_each_its_own_answer(budget: int, chunks: int) -> None:
    engine = make_engine(budget=budget, chunks=chunks)
    asked: dict[Key, tuple[list[int], SamplingParams]] = {}
    tokens: dict[Key, list[int]] = {}
    for i, length in enumerate(LENGTHS * 2):
        key, ids = (b"%d" % i, 0), prompt(length, i)
        params = replace(SAMPLED if i % 2 else GREEDY, seed=i, choice=i % 3, max_tokens=2 + i % 7)
        asked[key] = ids, params
        engine.add(key, ids, length, params)
        if i % 3 == 0:  # the others arrive between steps
            book(tokens, engine.step(1.0))
    run(engine, tokens)
    for key, (ids, params) in asked.items():
        assert len(tokens[key]) == params.max_tokens
        check_answer(ids, tokens[key], params)


def test_preemption_changes_no_answer() -> None:
    engine = make_engine(blocks=9, block_size=4)  # 32 tokens for 4 x 14
    params = replace(GREEDY, max_tokens=9)
    prompts = {(b"%d" % i, 0): prompt(5, i) for i in range(4)}
    for key, ids in prompts.items():
        engine.add(key, ids, 5, params)
    tokens = run(engine)
    assert engine.scheduler.stats.preemptions > 0
    for key, ids in prompts.items():
        assert len(tokens[key]) == 9
        check_answer(ids, tokens[key], params)


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 48])
def test_a_prefix_hit_changes_no_answer(length: int) -> None:
    engine = make_engine()
    ids = prompt(length)
    answers = []
    for i in range(3):
        engine.add((b"%d" % i, 0), ids, length, SAMPLED)
        answers.append(run(engine)[b"%d" % i, 0])
    check_answer(ids, answers[0], SAMPLED)
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
    assert engine.scheduler.stats.cached_prompt_tokens == 2 * ((length - 1) // BLOCK * BLOCK)
    other = [*ids[:16], *prompt(9, 5)]
    engine.add((b"other", 0), other, len(other), GREEDY)
    check_answer(other, run(engine)[b"other", 0], GREEDY)


@pytest.mark.parametrize("length", LENGTHS)
def test_kv_taken_over_from_another_pool_goes_on_as_if_nothing_happened(length: int) -> None:
    """A hand-off by copying spans: the decode side computes no prompt token."""
    producer, consumer = make_engine(), make_engine()
    ids, key = prompt(length), (b"a", 0)
    consumer.add((b"other", 0), prompt(20, 9), 20, GREEDY)  # so that block ids differ
    consumer.step(1.0)
    producer.add(key, ids, length, SAMPLED, hold=True)
    first = run(producer)[key]
    reservation = consumer.reserve(key, ids)
    assert reservation is not None
    pairs, _ = producer.take_held(key)
    for (remote, _), local in zip(pairs, reservation.blocks, strict=True):
        theirs, ours = producer.runner.region, consumer.runner.region  # type: ignore[attr-defined]
        ours.spans[local].copy_(theirs.spans[remote])
    computed = consumer.scheduler.stats.computed_prompt_tokens
    consumer.admit(key, ids + first, length, SAMPLED)
    answer = first + run(consumer)[key]
    assert consumer.scheduler.stats.computed_prompt_tokens == computed
    check_answer(ids, answer, SAMPLED)
    producer.add((b"b", 0), ids, length, SAMPLED)
    assert run(producer)[b"b", 0] == answer


def test_kv_that_is_copied_while_the_rest_is_computed_is_as_good() -> None:
    """Early pull, with the real stamps: a block that may be named is written and sealed."""
    producer, consumer = make_engine(budget=20), make_engine()
    theirs, ours = producer.runner.region, consumer.runner.region  # type: ignore[attr-defined]
    ids, key = prompt(70), (b"a", 0)
    reservation = consumer.reserve(key, ids)
    assert reservation is not None
    producer.add(key, ids, 70, SAMPLED, hold=True)
    copied, first = 0, []
    while not first:
        first = [output.token for output in producer.step(1.0)]
        for block, generation in producer.sealed_blocks(key)[copied:]:
            (stamp,) = theirs.trailers([block])
            assert (stamp.epoch, stamp.generation) == (EPOCH, generation)
            ours.spans[reservation.blocks[copied]].copy_(theirs.spans[block])
            copied += 1
    assert copied == 4
    pairs, _ = producer.take_held(key)
    ours.spans[reservation.blocks[4]].copy_(theirs.spans[pairs[4][0]])
    consumer.admit(key, ids + first, 70, SAMPLED)
    answer = first + run(consumer)[key]
    check_answer(ids, answer, SAMPLED)
    producer.add((b"b", 0), ids, 70, SAMPLED)
    assert run(producer)[b"b", 0] == answer


def test_zeroed_kv_changes_the_answer() -> None:
    """The KV is really used: else the test above proves nothing."""
    engine = make_engine()
    ids = prompt(33)
    engine.add((b"a", 0), ids, 33, GREEDY)
    answer = run(engine)[b"a", 0]
    engine.runner.region.kv.zero_()  # type: ignore[attr-defined]
    engine.add((b"b", 0), ids, 33, GREEDY)
    assert run(engine)[b"b", 0] != answer


def test_the_runner_publishes_odd_before_and_even_after() -> None:
    engine = make_engine(block_size=4)
    region = engine.runner.region  # type: ignore[attr-defined]
    engine.add((b"a", 0), prompt(9), 9, replace(GREEDY, max_tokens=3), hold=True)
    run(engine)
    pairs, _ = engine.take_held((b"a", 0))
    assert [generation for _, generation in pairs] == [2, 2, 2]
    assert region.seals[[block for block, _ in pairs]].tolist() == [[EPOCH, 2]] * 3
    stamps = region.trailers([block for block, _ in pairs])
    assert [(s.epoch, s.generation, s.block_id) for s in stamps] == [
        (EPOCH, 2, b) for b, _ in pairs
    ]
    reservation = engine.reserve((b"b", 0), prompt(20))
    assert reservation is not None
    fresh = list(reservation.blocks[reservation.num_cached :])
    assert region.seals[fresh, 1].tolist() == [1] * len(fresh)


# --- transformers ---


def our_logits(model: Model, ids: list[int]) -> Tensor:
    layout = KVLayout(
        "w", model.config.num_layers, model.config.num_kv_heads, model.config.head_dim, "", 16,
        "float32",
    )  # fmt: skip
    region = Region(layout, 12)
    blocks = tuple(range(1, 1 + -(-len(ids) // 16)))
    row = Row((b"a", 0), tuple(ids), 0, blocks, True, GREEDY, len(ids))
    plan = plan_attention([row], 16, CPU)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), region.kv, plan)
        return model.logits(hidden)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("rope_theta", [10000.0, 100000.0])
def test_logits_equal_those_of_transformers(tmp_path: Path, tied: bool, rope_theta: float) -> None:
    shape = replace(SHAPE, tied_head=tied, rope_theta=rope_theta)
    save_model(tmp_path, shape)
    assert read_config(tmp_path) == replace(shape, intermediate_size=INTERMEDIATE)
    ours = Model(read_config(tmp_path), read_weights(tmp_path), torch.float32, CPU)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for length in (1, 2, 17, 100):
        ids = prompt(length)
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        assert (our_logits(ours, ids) - expected).abs().max() < 1e-4


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    shape = read_config(tmp_path)
    assert (shape.num_kv_heads, shape.head_dim, shape.tied_head) == (4, 8, True)
    ours = Model(shape, read_weights(tmp_path), torch.float32, CPU)
    ids = [i % 64 for i in range(40)]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (our_logits(ours, ids) - expected).abs().max() < 1e-4


def test_our_naive_loop_is_right_too(tmp_path: Path) -> None:
    weights = save_model(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = prompt(33)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (naive_logits(ids, weights) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
        ({"architectures": None}, "architecture unknown"),
        ({"hidden_act": "gelu"}, "activation gelu"),
    ],
)
def test_a_model_that_is_not_supported_is_refused(
    tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    save_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=text):
        read_config(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no"):
        read_weights(tmp_path)
    weights = {name: t for name, t in WEIGHTS.items() if "layers.2.mlp.down" not in name}
    with pytest.raises(ModelError, match=r"lack 'model.layers.2.mlp.down_proj.weight'"):
        Model(SHAPE, weights, torch.float32, CPU)
