"""``baton local``'s graph behind a real HTTP server, in a thread of the test's process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from services.cli import build_parser
from services.config import load
from services.local import LocalGraph, local_graph
from tests.support.serving import Client, free_port, until


class LocalServer(Client):
    """A client that also reaches into the graph: what tests of one process are for."""

    graph: LocalGraph


@contextlib.contextmanager
def local_server(args: Sequence[str] = ()) -> Iterator[LocalServer]:
    """Serve ``baton local ARGS`` until the block ends; every worker's integrity is checked then."""
    flags = vars(build_parser().parse_args(["local", *args]))
    config = load(None, {k: v for k, v in flags.items() if k != "command"})
    started = threading.Event()
    client = LocalServer("")
    stop: dict[str, Any] = {}

    async def run() -> None:
        async with local_graph(config) as graph:
            port = free_port()
            server = uvicorn.Server(
                uvicorn.Config(graph.api(), "127.0.0.1", port, log_level="warning")
            )
            client.url, client.graph = f"http://127.0.0.1:{port}", graph
            stop["server"] = server
            started.set()
            await server.serve()
            for worker in graph.workers:
                worker.engine.pool.check_integrity()

    failure: list[BaseException] = []

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # handed to the test's thread
            failure.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=main, name="local-server")
    thread.start()
    try:
        assert started.wait(120)
        if failure:
            raise failure[0]
        until(lambda: _ready(client), "the local graph is ready", 60)
        yield client
    finally:
        if "server" in stop:
            stop["server"].should_exit = True
        thread.join(30)
        assert not thread.is_alive()
    if failure:
        raise failure[0]


def _ready(client: Client) -> bool:
    try:
        return client.get("/ready")[0] == 200
    except OSError:
        return False
