"""The text is never wrong: disaggregated answers equal one engine's, token for token.

Every target is the real thing: ``baton serve`` with Ray, two worker processes and NIXL, or the same
graph in one process over the memory transport. Reference and judge: ``tests.support.reference``.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from router.tokenizer import Tokenizer
from services.fetch import DEFAULT_MODEL, fetch
from tests.support.local_server import local_server
from tests.support.reference import Judge, default_model_judge
from tests.support.serving import Client, served

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 100, 513, 2000)
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.8, "seed": 7}
BLOCK = 16
LIMITS = ("--max-model-len", "2304", "--kv-blocks", "420", "--threads", "1")
SIZES = (*LIMITS, "--queue-timeout-s", "300")
# Two deployments run side by side: a request that is alone in its own keeps one core busy.
TARGETS = (("mixed", "memory"), ("tcp", "nixl"))


class Matrix(NamedTuple):
    """What is asked: some lengths alone, then all jobs with 16 in flight."""

    num_tokens: int
    alone: tuple[int, ...]
    jobs: list[tuple[int, dict[str, Any]]]


FULL = Matrix(48, LENGTHS, [(n, options) for n in LENGTHS for options in (GREEDY, SAMPLED)])
# Every length greedily among others, half of the longest; the rest where blocks begin, end, or are
# many.
SHORT = Matrix(
    17,
    (1, 16, 33, 100),
    [(n, GREEDY) for n in (*LENGTHS[:-1], 1000)] + [(n, SAMPLED) for n in (1, 15, 17, 32, 100)],
)
ONLY_IN_FULL = "tcp"  # make test has it with a small model, in integration and faults


@pytest.fixture(scope="session")
def text_ids() -> list[int]:
    """A long run of token ids of real text, starting with ordinary words."""
    tokenizer = Tokenizer.load(fetch(DEFAULT_MODEL))
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer.encode(" ".join(text.split()))
    assert len(ids) > 2000
    return ids


@pytest.fixture(scope="session")
def judge() -> Judge:
    return default_model_judge()


@contextmanager
def running(target: str) -> Iterator[Client]:
    """A server of the kind that the target names."""
    if target == "memory":
        with local_server(SIZES) as client:
            yield client
        return
    pools = ("--mixed", "1", "--prefill", "0", "--decode", "0")
    if target != "mixed":
        pools = ("--prefill", "1", "--decode", "1", "--transport", target)
    with served(*SIZES, *pools) as client:
        yield client


def counters(client: Client, role: str) -> dict[str, Any]:
    (worker,) = client.idle_workers(role)
    return worker


def prompt(text_ids: list[int], length: int) -> list[int]:
    return text_ids[:length]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_answers_are_right(
    targets: tuple[str, ...], text_ids: list[int], judge: Judge, full: bool
) -> None:
    """B094."""
    matrix = FULL if full else SHORT
    if not full:
        targets = tuple(target for target in targets if target != ONLY_IN_FULL)
    ask = partial(answers_of, text_ids, matrix)
    with ThreadPoolExecutor(len(targets)) as pool:
        answers = dict(zip(targets, pool.map(ask, targets), strict=True))
    for alone, together in answers.values():
        for length, answer in zip(matrix.alone, alone, strict=True):
            judge.check(prompt(text_ids, length), answer)
        for (length, options), answer in zip(matrix.jobs, together, strict=True):
            judge.check(prompt(text_ids, length), answer, **options)
    for tie in judge.ties:
        print(f"{targets}: {tie}")
    assert len(judge.ties) <= 2, judge.ties


def answers_of(
    text_ids: list[int], matrix: Matrix, target: str
) -> tuple[list[list[int]], list[list[int]]]:
    """What a deployment answers to each length alone, and to all jobs with 16 in flight."""

    def ask(length: int, run: str, **options: Any) -> list[int]:
        # A salt of its own keeps a request from another one's cached blocks.
        salt = f"{run}-{length}"
        ids = prompt(text_ids, length)
        return client.complete_ids(ids, matrix.num_tokens, cache_salt=salt, **options)

    with running(target) as client:
        before = {w["id"]: w for w in client.idle_workers()}
        alone = [ask(length, "alone") for length in matrix.alone]
        calls = [partial(ask, n, f"together-{len(o)}", **o) for n, o in matrix.jobs]
        together = client.at_once(calls, in_flight=16)
        lengths = [*matrix.alone, *(n for n, _ in matrix.jobs)]
        asked = sum(lengths)
        blocks = sum(-(-n // BLOCK) for n in lengths)
        if target == "mixed":
            mixed = counters(client, "mixed")
            done = mixed["computed_prompt_tokens"] - before[mixed["id"]]["computed_prompt_tokens"]
            assert done == asked
        else:
            check_kv_was_used(client, target, before, asked, blocks)
    return alone, together


def check_kv_was_used(
    client: Client, target: str, before: dict[str, Any], asked: int, blocks: int
) -> None:
    """P computed every prompt token, D none; every block went over the transport asked for."""
    p, d = counters(client, "prefill"), counters(client, "decode")
    p0, d0 = before[p["id"]], before[d["id"]]
    assert p["transport"] == d["transport"] == target
    assert (p["pid"] != d["pid"]) == (target != "memory")
    assert p["computed_prompt_tokens"] - p0["computed_prompt_tokens"] == asked
    assert d["computed_prompt_tokens"] - d0["computed_prompt_tokens"] == 0
    assert d["preemptions"] == 0
    assert d["pulled_blocks"] - d0["pulled_blocks"] == blocks
    assert d["pulled_bytes"] - d0["pulled_bytes"] == blocks * span_bytes(d)


def span_bytes(worker: dict[str, Any]) -> int:
    # 30 layers, K and V, 3 KV heads, 64 dimensions of float32, and the trailer
    return 30 * 2 * 3 * worker["block_size"] * 64 * 4 + 64


def test_second_turn_pulls_only_new_blocks(text_ids: list[int]) -> None:
    """B028, B095."""
    first = text_ids[:100]
    with local_server(SIZES) as client:
        answer = client.complete_ids(first, 60)
        d = counters(client, "decode")
        second = first + answer + text_ids[100:150]
        client.complete_ids(second, 4)
        later = counters(client, "decode")
    # D has KV of all but the answer's last token, in full blocks of 16.
    kept = (len(first) + len(answer) - 1) // BLOCK
    new = -(-len(second) // BLOCK) - kept
    assert later["pulled_blocks"] - d["pulled_blocks"] == new
    assert later["pulled_bytes"] - d["pulled_bytes"] == new * span_bytes(d)


def test_a_late_request_does_not_wait_for_the_others(text_ids: list[int]) -> None:
    body = {"temperature": 0, "ignore_eos": True, "cache_salt": "late"}
    with local_server(SIZES) as client:
        streaming, answered = threading.Event(), threading.Event()

        def long_one(offset: int) -> bool:
            """Whether its stream went on until the late request had a token; it is cut off then."""
            prompt = text_ids[offset : offset + 40]
            chunks = client.stream("/v1/completions", {**body, "prompt": prompt, "max_tokens": 900})
            for _ in islice(chunks, 3):
                pass
            streaming.set()
            cut_off = any(answered.is_set() for _ in chunks)
            chunks.close()
            return cut_off

        def late_one() -> int:
            assert streaming.wait(60)
            prompt = text_ids[500:520]
            chunks = client.stream("/v1/completions", {**body, "prompt": prompt, "max_tokens": 3})
            next(chunks)
            answered.set()
            return 1 + sum(1 for _ in chunks)

        results = client.at_once([*(partial(long_one, 60 * i) for i in range(4)), late_one])
    assert results[:-1] == [True] * 4
    assert results[-1] >= 3


def test_a_pool_too_small_for_all_preempts_with_equal_text(
    text_ids: list[int], judge: Judge
) -> None:
    # 8 sequences that grow to 96 tokens need 48 blocks; 6 of 35 are one sequence's.
    sizes = ("--max-model-len", "128", "--kv-blocks", "36")
    pools = ("--mixed", "1", "--prefill", "0", "--decode", "0")
    prompts = [text_ids[50 * i : 50 * i + 32] for i in range(8)]
    with local_server((*sizes, *pools)) as client:
        answers = client.at_once([partial(client.complete_ids, ids, 64) for ids in prompts])
        (mixed,) = client.idle_workers("mixed")
    assert mixed["preemptions"] > 0
    for ids, answer in zip(prompts, answers, strict=True):
        judge.check(ids, answer)
