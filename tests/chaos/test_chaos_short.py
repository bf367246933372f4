"""The chaos harness in its short form, as ``make test`` runs it; ``make chaos`` is the long one."""

import pytest

from tests.chaos.run import Options, chaos

# Of these seeds, one whose few faults are of all sorts: a kill, a drain, stops, a flood.
SHORT = Options(seed=6, seconds=16.0, num_questions=16, every_s=1.8)


@pytest.mark.timeout(400)
def test_nothing_is_wrong_lost_or_left_while_things_die() -> None:
    run, passed = chaos(SHORT)
    assert passed, "see the report above"
    assert run.injected
