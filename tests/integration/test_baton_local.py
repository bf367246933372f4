"""``baton local`` says where it listens when it does: who reads that line may ask at once."""

import asyncio
import builtins
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services import local
from services.config import AppConfig, ConfigError
from tests.support.serving import free_port


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Its lifespan takes a moment, as a router's does."""
    assert scope["type"] == "lifespan"
    for answer in ("startup", "shutdown"):
        await receive()
        await asyncio.sleep(0)
        await send({"type": f"lifespan.{answer}.complete"})


class Graph:
    """No workers, and an application that answers nothing."""

    async def discover(self) -> list[Any]:
        return []

    def api(self) -> Any:
        front = SimpleNamespace(console=SimpleNamespace(close=lambda: None))
        app.state = SimpleNamespace(front=front)  # type: ignore[attr-defined]
        return app


@contextlib.asynccontextmanager
async def no_workers(config: AppConfig) -> AsyncIterator[Graph]:
    yield Graph()


def test_the_address_is_printed_when_something_listens_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    said: list[str] = []

    def hear(text: str, **_: Any) -> None:
        said.append(text)
        if "Ctrl-C stops" in text:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(local, "local_graph", no_workers)
    monkeypatch.setattr(builtins, "print", hear)
    with contextlib.suppress(KeyboardInterrupt):
        local.run_local(AppConfig(port=port))
    monkeypatch.undo()
    assert said[:2] == [
        f"  http://127.0.0.1:{port}/console",
        f"  http://127.0.0.1:{port}/v1  (Ctrl-C stops)",
    ]


def test_a_port_that_is_taken_is_said_before_a_model_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: .* is taken by another process"):
            local.run_local(AppConfig(port=port, model="/nowhere"))
