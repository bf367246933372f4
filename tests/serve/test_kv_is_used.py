"""The KV that was pulled is what the answer is made of, and only the right KV is.

The graph in one process, so that a test can reach into a worker between two steps of a hand-off:
after the pull, before it, and while it waits. Text that differs from the right one may come from
KV that a test damaged where nothing can notice it; never from blocks that were reused or altered
under a ticket.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtransfer.ticket import Ticket
from router.tokenizer import Tokenizer
from services.fetch import DEFAULT_MODEL, fetch
from services.worker import Worker
from tests.support.local_server import LocalServer, local_server
from tests.support.serving import until

BLOCK = 16
NUM_TOKENS = 12
SIZES = ("--max-model-len", "512", "--kv-blocks", "100")
STORY = (
    "At home Anna always keeps her keys in the blue box, her letters in the red drawer, her coins "
    "in the old jar and her photographs under the bed. Where does she keep the keys, the letters, "
    "the coins and the photographs? She keeps"
)


@pytest.fixture(scope="module")
def story() -> list[int]:
    ids = Tokenizer.load(fetch(DEFAULT_MODEL)).encode(STORY)
    assert 3 * BLOCK < len(ids) < 4 * BLOCK
    return ids


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server(SIZES) as server:
        yield server


@pytest.fixture(scope="module")
def right(server: LocalServer, story: list[int]) -> list[int]:
    return server.complete_ids(story, NUM_TOKENS, cache_salt="undamaged")


def worker(server: LocalServer, role: str) -> Worker:
    (found,) = [w for w in server.graph.workers if w.settings.role == role]
    return found


def counters(server: LocalServer, role: str) -> dict[str, Any]:
    (found,) = server.idle_workers(role)
    return found


def risen(server: LocalServer, role: str, before: dict[str, Any]) -> Callable[[str], int]:
    now = counters(server, role)
    return lambda counter: now[counter] - before[counter]


def between_pull_and_admission(
    monkeypatch: pytest.MonkeyPatch, server: LocalServer, action: Callable[[list[int]], None]
) -> None:
    """Call ``action`` with D's blocks of a sequence, in its engine's thread, before it decodes."""
    engine = worker(server, "decode").engine
    admit = engine.admit

    def hooked(key: Any, *args: Any) -> None:
        action(list(engine._reserved[key].blocks))
        admit(key, *args)

    monkeypatch.setattr(engine, "admit", hooked)


def before_each_pull(
    monkeypatch: pytest.MonkeyPatch,
    server: LocalServer,
    action: Callable[[Ticket, Callable[[], None]], None],
) -> None:
    """Call ``action`` with the ticket, and what starts the pull, instead of each pull at D."""
    puller = worker(server, "decode")._puller
    pull = puller.pull

    def hooked(key: bytes, ticket: Ticket, *args: Any) -> None:
        action(ticket, lambda: pull(key, ticket, *args))

    monkeypatch.setattr(puller, "pull", hooked)


# --- the answer is made of what was pulled -------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_zeroed_block_changes_the_answer(
    index: int,
    monkeypatch: pytest.MonkeyPatch,
    server: LocalServer,
    story: list[int],
    right: list[int],
) -> None:
    region = worker(server, "decode").region
    zeroed: list[int] = []

    def zero(blocks: list[int]) -> None:
        region.kv[blocks[index]] = 0
        zeroed.append(blocks[index])

    between_pull_and_admission(monkeypatch, server, zero)
    answer = server.complete_ids(story, NUM_TOKENS, cache_salt=f"zeroed {index}")
    assert len(zeroed) == 1
    assert answer[0] == right[0]  # the first token comes from P
    assert answer != right


def test_a_look_at_the_blocks_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, server: LocalServer, story: list[int], right: list[int]
) -> None:
    """What the tests with damage are compared to: the same hook, without damage."""
    p, d = worker(server, "prefill").region, worker(server, "decode").region
    tickets: list[Ticket] = []
    equal: list[bool] = []

    def look(blocks: list[int]) -> None:
        pairs = zip(tickets[-1].block_ids, blocks, strict=True)
        equal.extend(bool((p.kv[mine] == d.kv[its]).all()) for mine, its in pairs)

    before_each_pull(monkeypatch, server, lambda ticket, go: (tickets.append(ticket), go())[1])
    between_pull_and_admission(monkeypatch, server, look)
    assert server.complete_ids(story, NUM_TOKENS, cache_salt="looked at") == right
    assert equal == [True] * 4


# --- wrong KV is never used ----------------------------------------------------------------------


def test_reused_blocks_are_refused_and_the_request_is_repeated(
    monkeypatch: pytest.MonkeyPatch, story: list[int], right: list[int]
) -> None:
    """A pull that comes after its lease has ended and other prompts have taken the blocks."""
    held: list[Callable[[], None]] = []
    tickets: list[Ticket] = []

    def hold_the_first(ticket: Ticket, go: Callable[[], None]) -> None:
        tickets.append(ticket)
        if len(tickets) == 1:
            held.append(go)
        else:
            go()

    # P's pool has room for four such prompts: the fifth evicts the first.
    with local_server(("--max-model-len", "80", "--kv-blocks", "18")) as server:
        d = counters(server, "decode")
        before_each_pull(monkeypatch, server, hold_the_first)
        answers: list[list[int]] = []
        late = threading.Thread(
            target=lambda: answers.append(server.complete_ids(story, NUM_TOKENS))
        )
        late.start()
        until(lambda: held, "its pull is held")
        p = worker(server, "prefill")
        p._loop.submit(lambda: p.roles._prefill.release(tickets[0].ticket_id))
        generations = dict(zip(tickets[0].block_ids, tickets[0].generations, strict=True))
        for offset in range(6):
            others = [id_ + offset + 1 for id_ in story]
            server.complete_ids(others, 2, cache_salt=f"other {offset}")
        now = p.engine.pool.generations
        assert any(now[block] != generation for block, generation in generations.items())
        held[0]()
        late.join(60)
        assert answers == [right]
        assert risen(server, "decode", d)("failed_pulls") == 1
        assert server.get("/internal/state")[1]["requests"]["retries"] == 1


@pytest.mark.parametrize("index", [0, 3])
def test_a_block_of_another_generation_is_refused(
    index: int,
    monkeypatch: pytest.MonkeyPatch,
    server: LocalServer,
    story: list[int],
    right: list[int],
) -> None:
    """When D pulls, one block has just been handed out again: D computes all of it itself."""
    p = worker(server, "prefill")

    def reuse(ticket: Ticket, go: Callable[[], None]) -> None:
        block, generation = ticket.block_ids[index], ticket.generations[index]
        p.region.kv[block] = 0
        p.region.open(p.epoch, [(block, generation + 1)])
        go()

    d = counters(server, "decode")
    before_each_pull(monkeypatch, server, reuse)
    answer = server.complete_ids(story, NUM_TOKENS, cache_salt=f"another generation {index}")
    assert answer == right
    alone = risen(server, "decode", d)
    assert alone("failed_pulls") == 1
    assert (alone("pulled_blocks"), alone("pulled_bytes")) == (0, 0)
    assert alone("computed_prompt_tokens") == len(story)


def test_an_altered_block_is_refused_with_checksums(
    monkeypatch: pytest.MonkeyPatch, story: list[int], right: list[int]
) -> None:
    """One flipped bit on the way, of the right generation: only a checksum can tell."""
    with local_server((*SIZES, "--checksums")) as server:
        p = worker(server, "prefill")
        altered: list[int] = []

        def alter_the_first(ticket: Ticket, go: Callable[[], None]) -> None:
            if not altered:
                altered.append(ticket.block_ids[1])
                p.region.spans[altered[0], 1000] ^= 1
                p.engine.pool._forget_name(altered[0])  # else P itself would use it once more
            go()

        d = counters(server, "decode")
        before_each_pull(monkeypatch, server, alter_the_first)
        assert server.complete_ids(story, NUM_TOKENS) == right
        assert altered
        assert risen(server, "decode", d)("failed_pulls") == 1


# --- what moves, and what does not ---------------------------------------------------------------


def test_one_request_is_computed_at_p_and_moved_whole(server: LocalServer) -> None:
    prompt = [*range(300, 340)]  # two blocks and a half
    p, d = counters(server, "prefill"), counters(server, "decode")
    server.complete_ids(prompt, 4)
    moved, computed = risen(server, "decode", d), risen(server, "prefill", p)
    assert computed("computed_prompt_tokens") == len(prompt)
    assert computed("generated_tokens") == 1
    assert computed("pulled_bytes") == 0
    assert moved("computed_prompt_tokens") == 0
    assert moved("generated_tokens") == 3
    assert moved("pulled_blocks") == 3
    assert moved("pulled_bytes") == 3 * worker(server, "decode").region.span_bytes


def test_a_repeated_request_moves_nothing(server: LocalServer) -> None:
    prompt = [*range(400, 400 + 2 * BLOCK)]  # full blocks only: a part of one is never cached
    answer = server.complete_ids(prompt, 4)
    p, d = counters(server, "prefill"), counters(server, "decode")
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    again = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert again["choices"][0]["token_ids"] == answer
    moved, computed = risen(server, "decode", d), risen(server, "prefill", p)
    # P computes the last block once more: the first token needs something to be computed.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == BLOCK
    assert computed("computed_prompt_tokens") == BLOCK
    assert computed("cached_prompt_tokens") == BLOCK
    assert (moved("pulled_blocks"), moved("pulled_bytes")) == (0, 0)
    assert moved("computed_prompt_tokens") == 0


@pytest.mark.parametrize("length", [1, BLOCK - 1])
def test_a_prompt_shorter_than_a_block_moves_one(length: int, server: LocalServer) -> None:
    prompt = [*range(500, 500 + length)]
    for _ in range(2):  # its block is not full, so the second time is like the first
        p, d = counters(server, "prefill"), counters(server, "decode")
        server.complete_ids(prompt, 3)
        moved = risen(server, "decode", d)
        assert risen(server, "prefill", p)("computed_prompt_tokens") == length
        assert moved("pulled_blocks") == 1
        assert moved("pulled_bytes") == worker(server, "decode").region.span_bytes


def test_one_token_needs_no_d(server: LocalServer) -> None:
    d = counters(server, "decode")
    server.complete_ids([*range(600, 640)], 1)
    moved = risen(server, "decode", d)
    assert (moved("steps"), moved("pulled_blocks"), moved("generated_tokens")) == (0, 0, 0)
