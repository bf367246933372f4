"""Strangers at every port that listens: nobody's request suffers, nothing grows, nothing is run.

B023, B098 (all ports, under load), B024 (fields that only workers may set).
"""

import ast
import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.fleet import fleet
from tests.faults.rig import TINY, VOCAB, HttpClient, complete, completion_body, model_folder
from tests.faults.strangers import Siege, listening

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 8
GROWTH_BYTES = 64 * 2**20  # of a process, for one that was told of 4 GiB


def a_prompt(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCAB - 1) for _ in range(100)]


def rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


# --- ports ----------------------------------------------------------------------------------------


async def besieged(folder: Path, transport: str, seconds: float) -> None:
    trap = folder / "made by a pickle"
    sizes = {"max_model_len": 256, "kv_blocks": 100}
    async with fleet(folder, transport, **sizes) as deployed:
        prompts = [a_prompt(seed) for seed in range(5)]
        right = [await deployed.complete(prompt, NUM_TOKENS) for prompt in prompts]
        pids = [worker.process.pid for worker in deployed.workers]
        bound = {pid: listening(pid) for pid in pids}
        for worker in deployed.workers:
            ports = bound[worker.process.pid]
            assert worker.card.port in ports
            assert set(ports.values()) == {"127.0.0.1"}, "not only on loopback"
        everything = [deployed.port, *(port for ports in bound.values() for port in ports)]
        cards = [worker.card for worker in deployed.workers]
        await asyncio.to_thread(Siege(cards, trap, everything, 0).visits)  # what is allocated once
        before = {pid: rss(pid) for pid in pids}
        siege = Siege(cards, trap, everything, seconds)
        answered = 0
        while siege.lasts:
            index = answered % len(prompts)
            assert await deployed.complete(prompts[index], NUM_TOKENS) == right[index]
            answered += 1
        visits = siege.visits()
        assert not trap.exists(), "a pickle from the network was loaded"
        assert all(worker.alive for worker in deployed.workers)
        grown = {pid: rss(pid) - before[pid] for pid in pids}
        assert max(grown.values()) < GROWTH_BYTES, grown
        assert {pid: listening(pid) for pid in pids} == bound
        await deployed.until_idle()
        print(f"\n{transport}: {answered} answered while {visits} came")
        assert answered > 2


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_strangers_at_the_workers_ports(tmp_path: Path, full: bool, transport: str) -> None:
    """B023, B098: endpoint, KV pool and HTTP ports of a deployment under load."""
    if transport == "nixl" and not full:
        pytest.skip("only in the full form")
    folder = model_folder(tmp_path, replace(TINY, max_model_len=256))
    asyncio.run(besieged(folder, transport, 60 if full else 1))


# --- code -----------------------------------------------------------------------------------------

LOADERS = {"pickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "jsonpickle"}
CALLS = {"recv_pyobj", "eval", "exec", "get_serialized_descs", "deserialize_descs"}


def suspicious(source: str) -> list[str]:
    """What in this code could turn bytes into behaviour."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        elif isinstance(node, ast.Call):
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            owner = getattr(getattr(called, "value", None), "id", "")
            if name in CALLS or (owner, name) in (("torch", "load"), ("yaml", "load")):
                found.append(f"line {node.lineno}: {owner or '...'}.{name}()")
        found += [f"line {node.lineno}: import of {name}" for name in names if name in LOADERS]
    return found


def test_nothing_is_unpickled() -> None:
    """B023: no loader of objects is used anywhere that bytes of the network could reach."""
    for bad in ("import pickle", "from cloudpickle import loads", "torch.load(x)", "eval(x)"):
        assert suspicious(bad), f"the check does not see {bad!r}"
    found = {
        str(path.relative_to(ROOT)): what
        for package in ("kvtransfer", "router", "services")
        for path in sorted((ROOT / package).rglob("*.py"))
        if (what := suspicious(path.read_text()))
    }
    assert not found


# --- fields ---------------------------------------------------------------------------------------

FOREIGN: tuple[dict[str, Any], ...] = (
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [0, 1, 2**40]}},
    {"kv_transfer_params": {"remote_host": "169.254.169.254", "remote_port": 80}},
    {"kv_transfer_params": {"remote_engine_id": "x" * 10_000, "num_blocks": 10**12}},
    {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 2**63},
    {"remote_block_ids": list(range(1000)), "remote_engine_id": "prefill"},
    {"ticket": "AAAA", "ticket_id": "AAAA", "attempt": -1, "epoch": 0, "worker_id": "prefill"},
    {"disagg_prefill_resp": {"first_token": 7}, "data_parallel_rank": 99},
)
HEADERS = b"x-prefill-host: 127.0.0.1:1\r\nx-prefiller-host-port: 127.0.0.1:1\r\n"


async def foreign_fields(folder: Path, rooms: int) -> None:
    sizes = {"max_model_len": 256, "kv_blocks": 100}
    async with fleet(folder, "tcp", **sizes) as deployed:
        prompt = a_prompt(1)
        right = await deployed.complete(prompt, NUM_TOKENS)
        for fields in FOREIGN:
            client = await HttpClient.post(
                deployed.port, completion_body(prompt, NUM_TOKENS, **fields), HEADERS
            )
            status, text = await client.answer()
            if status == 200:
                assert json.loads(text)["choices"][0]["token_ids"] == right, fields
            else:
                assert status == 400, (fields, text)
        await deployed.until_idle()
        before = {worker.process.pid: rss(worker.process.pid) for worker in deployed.workers}
        for room in range(rooms):
            await complete(deployed.port, [1, 2, 3], 1, bootstrap_room=room)
        grown = [rss(pid) - size for pid, size in before.items()]
        assert max(grown) < GROWTH_BYTES, grown
        await deployed.until_idle()


def test_clients_cannot_set_transfer_fields(tmp_path: Path, full: bool) -> None:
    """B024: fields and headers that other servers take from the public body change nothing."""
    folder = model_folder(tmp_path, replace(TINY, max_model_len=256))
    asyncio.run(foreign_fields(folder, 10_000 if full else 200))
