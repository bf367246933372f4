"""A counter that stands still is noticed, unless it was the watchdog that stood still."""

from __future__ import annotations

from services.watchdog import Watchdog


class Counter:
    def __init__(self) -> None:
        self.beats = 0
        self.now = 100.0
        self.dog = Watchdog("the engine", 5.0, lambda: self.beats)

    def look(self, after_s: float = 1.0, beats: int = 0) -> str:
        self.now += after_s
        self.beats += beats
        return self.dog.look(self.now)


def test_what_moves_is_left_alone() -> None:
    counter = Counter()
    assert not any(counter.look(beats=1) for _ in range(20))


def test_what_stands_still_is_noticed_after_the_limit() -> None:
    counter = Counter()
    counter.look()
    assert [bool(counter.look()) for _ in range(6)] == [False] * 4 + [True] * 2
    assert counter.look() == "the engine has not moved for 7 s"


def test_one_beat_is_enough_to_begin_anew() -> None:
    counter = Counter()
    for _ in range(20):
        assert not counter.look(beats=1)
        assert not any(counter.look() for _ in range(4))


def test_a_process_that_was_stopped_as_a_whole_has_not_hung() -> None:
    counter = Counter()
    counter.look()
    assert not counter.look(after_s=3600)
    assert not counter.look(beats=1)
    # one that hung before, and hangs still, is noticed all the same
    for _ in range(4):
        assert not counter.look()
    assert counter.look(after_s=3600)
