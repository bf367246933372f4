"""What the registry knows, without Ray: who is here, who starts, what the pools are to be."""

from typing import Any

from router.pools import Pools
from services.registry import LATE_S, SILENT_S, START_EXPIRE_S, Table


def plan(**targets: int) -> dict[str, Any]:
    """What who scales the pools says."""
    return {"targets": targets, "reasons": {}, "words": {}, "decisions": {}}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def table_at() -> tuple[Table, Clock]:
    clock = Clock()
    return Table(clock=clock), clock


def failures(table: Table) -> list[tuple[str, str, int]]:
    """(role, reason, in a row)."""
    return [(f.role, f.reason, f.in_a_row) for f in Pools(**table.pools()).failures]


def beat(table: Table, clock: Clock, seconds: float, *names: str, role: str = "decode") -> None:
    """Workers start and say so each second; the table is looked at as often."""
    for _ in range(int(seconds)):
        for name in names:
            table.starting(name, role)
        table.expire()
        clock.now += 1


def test_the_table_expires_by_its_clock() -> None:
    now = [0.0]
    table = Table(clock=lambda: now[0], expire_s=5)
    version = table.version
    assert table.heartbeat("a", b"card", b"load 1")
    assert not table.heartbeat("a", b"card", b"load 2")  # only a card is news
    now[0] = 4
    table.heartbeat("b", b"card", b"load")
    assert not table.expire()
    now[0] = 6
    assert table.expire()
    assert table.reports() == [(b"card", b"load")]
    assert table.version == version + 3


def test_a_router_that_asks_no_more_expires_without_news_to_anybody() -> None:
    now = [0.0]
    table = Table(clock=lambda: now[0], expire_s=5)
    version = table.version
    table.present({"replica": "router-1"})
    now[0] = 4
    table.present({"replica": "router-2"})
    now[0] = 6
    assert not table.expire()
    assert table.routers() == [{"replica": "router-2"}]
    assert table.version == version


# --- workers that start, and the plan -----------------------------------------------------------


def test_a_start_that_goes_well_is_no_news() -> None:
    table, clock = table_at()
    version = table.version
    beat(table, clock, 60, "a")
    assert not table.started("a", "decode")
    clock.now += 60
    assert not table.expire()
    assert table.version == version
    assert table.pools() == {"failures": (), "start_failures": {}}


def test_failed_starts_are_counted_in_a_row_until_one_goes_well() -> None:
    table, _ = table_at()
    version = table.version
    for name in ("a", "b"):
        table.starting(name, "decode")
        assert table.failed(name, "decode", f"{name} fails")
    table.failed("c", "prefill", "c fails")
    assert failures(table) == [("decode", "exception", 2), ("prefill", "exception", 1)]
    assert Pools(**table.pools()).failures[0].message == "b fails"
    assert table.version == version + 3
    table.starting("d", "decode")
    assert table.started("d", "decode")
    assert failures(table) == [("prefill", "exception", 1)]
    table.failed("e", "decode", "e fails")
    assert failures(table) == [("prefill", "exception", 1), ("decode", "exception", 1)]
    # what is counted stays
    counts = {("decode", "exception"): 3, ("prefill", "exception"): 1}
    assert table.pools()["start_failures"] == counts


def test_one_that_is_not_heard_of_any_more_while_it_starts_has_died() -> None:
    """Also when another one has taken its place meanwhile, as Serve sees to at once."""
    table, clock = table_at()
    table.tell(plan(decode=1))
    beat(table, clock, 5, "killed")
    beat(table, clock, START_EXPIRE_S - 1, "its successor")
    assert failures(table) == []
    beat(table, clock, 3, "its successor")
    assert failures(table) == [("decode", "died", 1)]
    (failure,) = Pools(**table.pools()).failures
    assert failure.worker == "killed"
    assert "its memory" in failure.message
    clock.now += 1
    assert not table.expire()  # once
    table.started("its successor", "decode")
    assert failures(table) == []
    assert table.pools()["start_failures"] == {("decode", "died"): 1}


def test_one_that_goes_since_the_pool_shrank_has_not_failed() -> None:
    table, clock = table_at()
    table.tell(plan(decode=2, prefill=1))
    beat(table, clock, 3, "not wanted any more")
    assert table.tell(plan(decode=1, prefill=1))
    clock.now += START_EXPIRE_S + 1
    table.expire()
    assert failures(table) == []
    # nor one that says so itself
    table.starting("says so", "decode")
    assert not table.leave("says so")
    clock.now += START_EXPIRE_S + 1
    table.expire()
    assert failures(table) == []
    # a later one has
    clock.now += LATE_S
    beat(table, clock, 3, "killed")
    clock.now += START_EXPIRE_S + 1
    assert table.expire()
    assert failures(table) == [("decode", "died", 1)]


def test_one_that_died_before_the_pool_shrank_has_failed() -> None:
    table, clock = table_at()
    table.tell(plan(decode=2))
    beat(table, clock, 3, "killed")
    clock.now += SILENT_S
    table.tell(plan(decode=0))
    clock.now += START_EXPIRE_S
    assert table.expire()
    assert failures(table) == [("decode", "died", 1)]


def test_one_that_was_started_since_the_pool_grew_again_is_wanted() -> None:
    table, clock = table_at()
    for target in (1, 0, 1):
        clock.now += LATE_S / 4
        table.tell(plan(decode=target))
    clock.now += LATE_S / 4
    beat(table, clock, 3, "killed")
    clock.now += START_EXPIRE_S
    assert table.expire()
    assert failures(table) == [("decode", "died", 1)]


def test_one_that_was_missed_too_early_starts_all_the_same() -> None:
    table, clock = table_at()
    beat(table, clock, 1, "slow")
    clock.now += START_EXPIRE_S + 1
    assert table.expire()
    assert failures(table) == [("decode", "died", 1)]
    table.starting("slow", "decode")
    assert table.started("slow", "decode")
    assert failures(table) == []


def test_only_other_targets_are_news() -> None:
    table, _ = table_at()
    version = table.version
    assert table.tell(plan(decode=1))
    assert not table.tell({**plan(decode=1), "words": {"decode": "the load is the same"}})
    assert table.pools()["words"] == {"decode": "the load is the same"}
    assert table.tell(plan(decode=2))
    assert table.version == version + 2


def test_readers_of_before_a_restart_bring_back_what_is_known_of_failed_starts() -> None:
    before, _ = table_at()
    for name in ("a", "b"):
        before.failed(name, "decode", "bad")
    before.failed("c", "prefill", "bad")
    known = Pools(**before.pools())
    after, _ = table_at()
    assert after.recall(before.version, known)
    assert Pools(**after.pools()) == known
    assert not after.recall(before.version, known)  # of the next reader: nothing is counted twice
    after.failed("d", "decode", "bad")
    assert failures(after) == [("decode", "exception", 3), ("prefill", "exception", 1)]
    assert after.pools()["start_failures"]["decode", "exception"] == 3
    # one of now has nothing to bring back
    after.started("e", "prefill")
    assert not after.recall(after.version - 1, known)
    assert failures(after) == [("decode", "exception", 3)]
    # nor does one of before know better than a worker that has started since
    after.recall(before.version, known)
    assert failures(after) == [("decode", "exception", 3)]
