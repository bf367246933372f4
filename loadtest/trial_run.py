"""Runs one trial against a server, and waits for the server to be idle before the next.

Knows the server only by its answers: it is idle when it answers the shortest request as fast as it
did when nothing else was asked of it.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from loadtest.client import Client
from loadtest.conversation import Conversation
from loadtest.record import Record, RunResult
from loadtest.runner import run
from loadtest.trial import Objectives, Window, judge, patience_s

SLACK_S = 0.2  # after a deadline, for answers on their way
PING = "Hello"
QUIET_FACTOR, QUIET_S = 2.0, 0.05  # a quiet server answers within so much of its best
PINGS = 3


async def run_trial(
    conversations: Sequence[Conversation],
    client: Client,
    window: Window,
    objectives: Objectives,
    stop: asyncio.Event,
    on_record: Callable[[Record], None] | None = None,
) -> RunResult:
    """The requests that are due in the window, all of them ended.

    Later turns of conversations go on until the last of those has ended, so that it sees the load
    that it would see; they do not count. ``stop`` cuts everything off at once.
    """
    loop = asyncio.get_running_loop()
    cut = asyncio.Event()
    started = loop.time()
    task = asyncio.create_task(run(conversations, client, stop=cut, on_record=on_record))
    stopping = asyncio.create_task(stop.wait())
    try:
        wait_s = window.duration_s + patience_s(conversations, window, objectives) + SLACK_S
        await asyncio.wait((task, stopping), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        cut_s = loop.time() - started
        cut.set()
        result = await task
    finally:
        task.cancel()
        stopping.cancel()
    records = tuple(
        judge(record, objectives, cut_s - record.sent_s)
        for record in result.records
        if window.start_s <= record.due_s < window.duration_s
    )
    interrupted = stop.is_set() and result.interrupted
    return replace(
        result,
        records=records,
        duration_s=max(result.duration_s - window.start_s, 0.0),
        num_planned=result.num_planned if interrupted else len(records),
        interrupted=interrupted,
    )


async def ping_s(client: Client) -> float:
    """How long the shortest request takes at best; infinite if the server does not answer."""
    return min([await _ping_s(client) for _ in range(PINGS)])


async def wait_quiet(client: Client, best_s: float, patience_s: float, stop: asyncio.Event) -> str:
    """Return when the server answers as fast as one that has nothing else to do; else why not.

    A client that goes away does not stop every server: what was cut off may still be computed.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while not stop.is_set():
        took_s = await _ping_s(client)
        if took_s <= best_s * QUIET_FACTOR + QUIET_S:
            return ""
        if math.isinf(took_s):
            return "it did not answer before its turn"
        if loop.time() > end:
            return f"it was still busy {patience_s:g} s after the turn before"
        await asyncio.sleep(min(took_s, 1.0))
    return ""


async def _ping_s(client: Client) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    reply = await client.send(PING, 1)
    return math.inf if reply.error else loop.time() - started
