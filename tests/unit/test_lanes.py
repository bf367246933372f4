"""Who runs a test beside which others, when two processes do."""

from tests.conftest import lane_of


def test_a_files_tests_stay_together_and_deployments_are_in_one_lane() -> None:
    assert lane_of("tests/unit/test_lanes.py::test_a[x::y]") == "tests/unit/test_lanes.py"
    lanes = {
        lane_of(test)
        for test in ("tests/serve/test_serve.py::test_a", "tests/chaos/test_chaos_short.py::test_b")
    }
    assert lanes == {"deployments"}
