"""The chaos harness in its short form, as ``make test`` runs it; ``make chaos`` is the long one."""

import pytest

from tests.chaos.run import Options, chaos

SHORT = Options(seed=1, seconds=24.0, clients=8, num_questions=24, every_s=2.5)


@pytest.mark.timeout(400)
def test_nothing_is_wrong_lost_or_left_while_things_die() -> None:
    run, passed = chaos(SHORT)
    assert passed, "see the report above"
    assert run.injected
