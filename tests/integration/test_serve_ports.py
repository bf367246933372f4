"""The side ports of ``baton serve``: chosen seconds before HAProxy listens on them."""

import socket
from pathlib import Path

import pytest

from services import serve
from services.config import ConfigError
from tests.support.serving import PORTS_OF_TESTS

RANGE = serve.PORT_RANGE
FIRST = PORTS_OF_TESTS.stop  # nobody else listens from there on, until where baton serve does


@pytest.fixture(autouse=True)
def two_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PORT_RANGE", (FIRST, FIRST + 2 * serve.PORTS))


def test_the_system_gives_none_of_them_to_an_outgoing_connection() -> None:
    lowest, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert RANGE[1] <= int(lowest)


def test_a_range_of_which_one_is_taken_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", FIRST + 57)):
        assert {serve.free_range(0) for _ in range(10)} == {FIRST + serve.PORTS}


def test_the_api_keeps_its_port() -> None:
    assert {serve.free_range(FIRST + 150) for _ in range(10)} == {FIRST}


def test_none_is_left() -> None:
    with (
        socket.create_server(("127.0.0.1", FIRST)),
        pytest.raises(ConfigError, match="no 100 free ports"),
    ):
        serve.free_range(FIRST + 100)
