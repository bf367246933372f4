"""The benchmark of the engine: its count of operations, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from services.engine.linear import product
from tests import bench_engine
from tests.support import bench, bench_contenders
from tests.support.bench import Case, Results
from tests.support.bench_contenders import Baton, Setup
from tests.support.roofline import Ceilings, Shape, decode_flops, prefill_flops
from tests.support.tiny_model import save_model


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(bench_contenders, "STEPS_S", 0.0)
    monkeypatch.setattr(bench_contenders, "READ_BYTES", 1 << 16)
    save_model(tmp_path / "model")
    return Setup(tmp_path / "model", threads=1, max_batch=5, max_tokens=100)


def test_operations_are_those_that_torch_counts(setup: Setup) -> None:
    """``transformers`` with plain products, which computes every pair of attention, seen or not."""
    from transformers import AutoModelForCausalLM

    shape = Shape.of(setup.config)
    model = AutoModelForCausalLM.from_pretrained(setup.folder, attn_implementation="eager")

    def counted(ids: torch.Tensor, cache: object = None) -> tuple[int, object]:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return counter.get_total_flops(), out.past_key_values

    total, cache = counted(torch.ones(3, 20, dtype=torch.long))
    unseen = shape.attention_flops(20 * 19 // 2)
    assert total == 3 * (prefill_flops(shape, 20) + unseen)
    total, _ = counted(torch.ones(3, 1, dtype=torch.long), cache)
    assert total == decode_flops(shape, 3, 20)


def test_the_bytes_of_int8_are_those_of_its_matrices() -> None:
    shape = Shape(1, 64, 4, 4, 16, 128, 256)  # nothing is padded
    matrices = [product(torch.ones(o, i), int8=True) for i, o in [*shape.matrices, (64, 256)]]
    assert shape.weight_bytes(int8=True) == sum(matrix.num_bytes for matrix in matrices)


def test_it_runs(setup: Setup, tmp_path: Path) -> None:
    """All contenders, on a tiny model; its numbers mean nothing, but they must be there."""
    parts = bench_engine.build(setup, [], max_rows=32)
    results = Results(parts.shape, forms=parts.machine.forms)
    cases = [Case(12), Case(40), Case(20, 1), Case(20, 5)]

    bench.run(results, parts.contenders, cases, 2, parts.machine, lambda: parts.overheads(results))

    names = [contender.name for contender in parts.contenders]
    assert names == [
        "Baton fp32",
        "Baton fp32, steps of 2048",
        "Baton int8",
        "Baton int8, steps of 2048",
        "transformers fp32",
    ]
    able = {case: [n for n in names if not case.batch or "steps" not in n] for case in cases}
    assert [(c.contender, c.case) for c in results.cells] == [
        (name, case) for case in cases for name in able[case]
    ]
    for cell in results.cells:
        assert len(cell.timings) == len(cell.ceilings) == 2
        assert all(timing.seconds > 0 for timing in cell.timings)
        if cell.case.batch:  # two steps before the five that count: 22 to 26 tokens of context
            assert all(timing.context == 24 for timing in cell.timings)
        share = cell.share(parts.shape)
        assert share is not None
        assert 0 < share < 1
    assert len(results.overheads_ms) == 6
    assert all(len(values) == 2 for values in results.overheads_ms.values())
    results.save(tmp_path / "results.json", {"command": "c"})
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["command"] == "c"
    assert len(kept["cells"]) == len(results.cells)
    text = bench_engine.report(results, bench_engine.targets(results), "heading")
    assert text.startswith("heading\n\n| ceiling")
    assert text.count("| transformers fp32") == 4


def test_what_a_step_takes_outside_the_model(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that moves only inside the model, and in the sampler."""
    baton = Baton(setup, "float32", 32)
    now = [0.0]
    monkeypatch.setattr(bench_contenders.time, "perf_counter", lambda: now[0])

    def takes(owner: object, name: str, seconds: float) -> None:
        plain = getattr(owner, name)

        def slowly(*args: object) -> object:
            now[0] += seconds
            return plain(*args)

        monkeypatch.setattr(owner, name, slowly)

    takes(baton.model, "forward", 1.0)
    takes(baton.model, "logits", 0.5)
    takes(baton.engine.scheduler, "update", 0.002)
    assert baton.overhead_ms(3, 20, sampled=1) == pytest.approx(2)
    assert baton.engine.pool.num_available == baton.engine.pool.num_usable
    baton.engine.check_integrity()


def test_prompts_and_batches_are_computed_afresh(setup: Setup) -> None:
    """No prefix of an earlier one is found, and the engine is empty after each."""
    baton = Baton(setup, "float32", 32)
    for _ in range(3):
        baton.prefill(baton.engine, 40)
        baton.decode(5, 20)
        baton.engine.check_integrity()
        assert not baton.engine.has_work
    assert baton.engine.scheduler.stats.cached_prompt_tokens == 0
    assert baton.engine.scheduler.stats.computed_prompt_tokens >= 3 * 40
    first, second = baton.prompt(40), baton.prompt(40)
    assert first[:16] != second[:16]


def test_the_roof_of_this_machine_is_the_best_of_its_forms(setup: Setup) -> None:
    machine = bench_contenders.Machine(Shape.of(setup.config), 1)
    found = machine()
    assert isinstance(found, Ceilings)
    rates = {name: values[-1] for name, values in machine.forms.items()}
    assert found.flops_s == max(rates[name] for name in machine.products)
    assert found.bytes_s == max(rates[name] for name in machine.reads)
