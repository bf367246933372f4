"""Every family's logits against ``transformers``, through the engine as it is served: prompts in
chunks of 7, decode steps among them, prefixes from the cache; and disaggregated answers against
those of one mixed worker.

What makes a family different must matter here: without it the comparison fails.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from router import wire
from router.dispatch import Dispatcher
from router.job import GenRequest
from services.engine.attention import batch_order
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.model import Model
from services.engine.model_config import ModelConfig, ModelError, RopeScaling, read_config
from services.engine.runner import ModelRunner
from services.engine.scheduler import Plan
from services.engine.sequence import Key, SamplingParams
from services.engine.weights import read_weights
from tests.guards.graph import running
from tests.support.families import FAMILIES, MAX_LEN, ONE_OF_EACH, VOCAB_SIZE, WINDOW
from tests.support.reference import Judge

CPU = torch.device("cpu")
BLOCK, CHUNK, BLOCKS = 16, 7, 40
TOLERANCE = 1e-4
WRONG = 10 * TOLERANCE  # at least so far off is what lacks a part
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    """Tensors this small are slower on several threads, and much slower on a busy machine."""
    disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Saved:
    """A checkpoint in a folder, and ``transformers``' model of it."""

    folder: Path
    theirs: Any

    def logits(self, ids: list[int]) -> Tensor:
        """``[len(ids), vocab_size]`` as it should be."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Checkpoints by name, made when first asked for."""

    @cache
    def make(name: str) -> Saved:
        folder = tmp_path_factory.mktemp(name)
        return Saved(folder, FAMILIES[name].save(folder))

    return make


class RecordingModel(Model):
    """Keeps the logits of every token that is computed; ``plain``: without compiled layers."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], plain: bool = False
    ) -> None:
        super().__init__(config, weights, torch.float32, CPU)
        if plain:
            self.cpu_layers = None
        self.last = torch.empty(0)  # [num_tokens, vocab_size] of the last step

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: Any,
        pause: Callable[[], None] = lambda: None,
    ) -> Tensor:
        hidden = super().forward(ids, positions, kv, plan, pause)
        self.last = self.logits(hidden)
        return hidden


class RecordingRunner(ModelRunner):
    """Sorts them by sequence and position."""

    model: RecordingModel

    def __init__(self, model: RecordingModel, region: Region) -> None:
        super().__init__(model, region, epoch=1)
        self.seen: dict[Key, dict[int, Tensor]] = {}

    def run(self, plan: Plan) -> list[int]:
        tokens = super().run(plan)
        rows = [plan.rows[i] for i in batch_order(plan.rows)]
        parts = self.model.last.split([len(row.ids) for row in rows])
        for row, logits in zip(rows, parts, strict=True):
            self.seen.setdefault(row.key, {}).update(enumerate(logits, row.start))
        return tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(length * 1000 + seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(length)]


def worst(model: RecordingModel, right: Saved) -> float:
    """The largest difference of any logit from ``transformers``', in a life of an engine: one long
    prompt alone, then one that begins like it, then several at once, some of which decode already.
    """
    config = model.config
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    region = Region(KVLayout("w", *shape, config.rope, BLOCK, "float32"), BLOCKS)
    limits = EngineConfig(BLOCKS, BLOCK, MAX_LEN, token_budget=CHUNK)
    runner = RecordingRunner(model, region)
    engine = Engine(limits, runner)
    first = prompt(100)
    rounds = [[first], [first[:83] + prompt(20)], [prompt(n, seed=1) for n in (1, 7, 40, 70)]]
    gap = 0.0
    for number, prompts in enumerate(rounds):
        texts = {(b"%d" % number, i): list(ids) for i, ids in enumerate(prompts)}
        starts = {}
        for key, ids in texts.items():
            engine.add(key, ids, len(ids), GREEDY)
        while engine.has_work:
            for output in engine.step(1.0):
                texts[output.key].append(output.token)
                starts[output.key] = output.num_cached
        for key, ids in texts.items():
            computed = runner.seen.pop(key)
            expected = right.logits(ids)
            assert sorted(computed) == list(range(starts[key], len(ids) - 1))
            gap = max(gap, *((computed[p] - expected[p]).abs().max().item() for p in computed))
    assert engine.scheduler.stats.cached_prompt_tokens == 80
    return gap


@pytest.mark.parametrize("plain", [False, True], ids=["served", "plain"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(
    name: str, plain: bool, saved: Callable[[str], Saved]
) -> None:
    right = saved(name)
    model = RecordingModel(read_config(right.folder), read_weights(right.folder), plain)
    assert (model.cpu_layers is None) == (plain or model.config.head_dim % 8 != 0)
    assert worst(model, right) < TOLERANCE


PARTS: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {"rope_theta": 20000.0}),
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": RopeScaling(8.0)}),
    ("llama3", {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 256)}),
    ("llama-linear-biases", {"rope_scaling": None}),
    ("llama-linear-biases", {"qkv_bias": False}),
    ("llama-linear-biases", {"output_bias": False}),
    ("llama-linear-biases", {"mlp_bias": False}),
    ("mistral", {"window": 0}),
    ("mistral", {"window": WINDOW - 1}),
    ("mistral", {"window": WINDOW + 1}),
    ("mistral", {"window_layers": (0, 1, 2)}),
    ("qwen2", {"qkv_bias": False}),
    ("qwen2-windows", {"window_layers": (0, 1, 2, 3)}),
    ("qwen2-windows", {"window_layers": ()}),
    ("qwen3", {"qk_norm": False}),
    ("smollm3", {"unrotated_layers": ()}),
    ("smollm3", {"unrotated_layers": (2,)}),
    ("smollm3-windows", {"unrotated_layers": (3,)}),
    ("smollm3-windows", {"window_layers": ()}),
]


@pytest.mark.parametrize(("name", "changes"), PARTS, ids=str)
def test_a_part_that_is_left_out_shows(
    name: str, changes: dict[str, Any], saved: Callable[[str], Saved]
) -> None:
    """And none of these may pass for the same model when KV is handed over."""
    right = saved(name)
    config = read_config(right.folder)
    wrong = replace(config, **changes)
    assert wrong.rope != config.rope
    assert worst(RecordingModel(wrong, read_weights(right.folder)), right) > WRONG


@pytest.mark.parametrize(
    "norm", ["q_norm", "k_norm", "input_layernorm", "post_attention_layernorm"]
)
def test_every_norm_shows(norm: str, saved: Callable[[str], Saved]) -> None:
    right = saved("qwen3")
    weights = read_weights(right.folder)
    name = next(n for n in weights if n.startswith("model.layers.3.") and f"{norm}." in n)
    weights[name] = torch.ones_like(weights[name])
    assert worst(RecordingModel(read_config(right.folder), weights), right) > WRONG


# --- from a folder --------------------------------------------------------------------------------


def test_shards_are_read_and_nothing_else(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    original = saved("qwen3").folder
    shards = sorted(path.name for path in original.glob("*.safetensors"))
    assert len(shards) > 2
    folder = shutil.copytree(original, tmp_path / "copy")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights under other names")
    weights = read_weights(folder)
    assert len(weights) == 4 * 11 + 3
    (folder / shards[1]).write_bytes((original / shards[1]).read_bytes()[:-8])
    with pytest.raises(ModelError, match=f"cannot read .*{shards[1]}"):
        read_weights(folder)
    (folder / shards[1]).unlink()
    with pytest.raises(ModelError, match=f"{shards[1]} is missing"):
        read_weights(folder)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3", "model.layers.3.mlp.up_proj.weight"),
        ("mistral", "lm_head.weight"),
        ("llama-linear-biases", "model.layers.2.mlp.down_proj.bias"),
    ],
)
def test_weights_that_are_missing_or_do_not_fit_are_named(
    name: str, lost: str, saved: Callable[[str], Saved]
) -> None:
    folder = saved(name).folder
    config, weights = read_config(folder), read_weights(folder)
    tensor = weights.pop(lost)
    with pytest.raises(ModelError, match=f"lack '{lost}'"):
        Model(config, weights, torch.float32, CPU)
    weights[lost] = torch.cat((tensor, tensor), -1)
    with pytest.raises(ModelError, match=f"'{lost}' has the shape"):
        Model(config, weights, torch.float32, CPU)
    weights[lost] = tensor.to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match=f"'{lost}' is stored as torch.float8_e4m3fn"):
        Model(config, weights, torch.float32, CPU)


def test_tensors_that_no_one_asks_for(
    saved: Callable[[str], Saved], caplog: pytest.LogCaptureFixture
) -> None:
    """Old files hold what can be computed; a part that config.json does not know gets a line."""
    folder = saved("llama3").folder
    config, weights = read_config(folder), read_weights(folder)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied, and stored twice
    Model(config, weights, torch.float32, CPU)
    assert not caplog.records
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(48)
    Model(config, weights, torch.float32, CPU)
    assert "not used: model.layers.0.self_attn.q_proj.bias" in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_4_wrote_is_read_the_same(
    name: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    folder = saved(name).folder
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["torch_dtype"] = raw.pop("dtype")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == read_config(folder)


# --- handed over ----------------------------------------------------------------------------------

PROMPT = prompt(100, seed=2)
SEED = 11


async def answer(dispatcher: Dispatcher, temperature: float, *ends: int) -> list[int]:
    """Of twelve tokens, or up to the first of ``ends``."""
    sampling = wire.Sampling(12, temperature=temperature, seed=SEED, stop_ids=ends)
    tokens: list[int] = []
    finish = ""
    async for chunk in dispatcher.generate(GenRequest(tuple(PROMPT), sampling, 12)):
        tokens += chunk.ids
        finish = chunk.finish
    assert finish == ("stop" if ends else "length")
    return tokens


async def answers(folder: Path, roles: list[str], weights_dtype: str) -> list[list[int]]:
    """Greedy and sampled, by the whole graph; only prefill or mixed workers compute prompts."""
    async with running(folder, roles, weights_dtype) as (dispatcher, workers):
        result = [await answer(dispatcher, temperature) for temperature in (0.0, 0.8)]
        sampled = result[1]
        # Models of these families name several ids that end an answer.
        shorter = await answer(dispatcher, 0.8, sampled[9], sampled[6])
        assert shorter == sampled[: 1 + min(sampled.index(sampled[i]) for i in (6, 9))]
        for worker in workers:
            stats = worker.engine.scheduler.stats
            assert (stats.computed_prompt_tokens == 0) == (worker.settings.role == "decode")
        return result


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("weights_dtype", ["float32", "int8"])
def test_disaggregated_answers_are_those_of_one_worker(
    name: str, weights_dtype: str, saved: Callable[[str], Saved]
) -> None:
    right = saved(name)

    async def both() -> list[list[list[int]]]:
        deployments = ["prefill", "decode"], ["mixed"]
        return [await answers(right.folder, roles, weights_dtype) for roles in deployments]

    apart, together = asyncio.run(both())
    assert [len(tokens) for tokens in apart] == [12, 12]
    assert apart == together
    if weights_dtype == "float32":
        judge = Judge(right.theirs)
        for tokens, temperature in zip(apart, (0.0, 0.8), strict=True):
            judge.check(PROMPT, tokens, temperature, SEED)
