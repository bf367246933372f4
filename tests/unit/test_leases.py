"""Which leases are renewed when, and who hears of their end."""

from __future__ import annotations

from router.leases import Leases


def test_due_after_each_third() -> None:
    leases = Leases()
    leases.add(b"a", 30.0, 0.0, lambda: None)
    renewed = [now for now in range(31) if leases.due(float(now))]
    assert renewed == [10, 20, 30]
    leases.remove(b"a")
    leases.remove(b"a")
    assert leases.due(100.0) == leases.ids == ()


def test_a_late_renewal_does_not_bring_the_next_one_nearer() -> None:
    leases = Leases()
    leases.add(b"a", 3.0, 0.0, lambda: None)
    assert leases.due(2.5) == (b"a",)
    assert leases.due(3.4) == ()
    assert leases.due(3.5) == (b"a",)


def test_the_end_is_told_once_and_only_to_who_still_wants_it() -> None:
    leases = Leases()
    ended: list[str] = []
    leases.add(b"a", 3.0, 0.0, lambda: ended.append("a"))
    leases.add(b"b", 3.0, 0.0, lambda: ended.append("b"))
    leases.remove(b"a")
    assert leases.expired((b"a", b"b", b"c")) == 1
    assert leases.expired((b"a", b"b", b"c")) == 0
    assert ended == ["b"]
    assert b"b" not in leases
