"""Sends conversations when they are due, and records what comes of each request.

Open loop: each conversation starts at its own time, measured from the start of the run, whether or
not others have been answered; a client that falls behind sends late and says so (``lag_s``), but
never shifts what follows. Closed loop: so many conversations at a time, another when one ends.

Run it in a loop of :func:`loadtest.event_loop.new_event_loop`, whose timers are precise. Knows
neither workloads nor statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from loadtest.client import Client, Exchange, Messages, Reply
from loadtest.conversation import Conversation, Text
from loadtest.receipt import clock
from loadtest.record import INTERRUPTED, NO_IDS, SKIPPED, Record, RunResult

AHEAD_S = 0.1  # a connection is made so long before a conversation is due
YOUNG_ONLY = (2_000, 500, 1000)  # objects until the young ones are walked over: 0.1 ms
Numbered = tuple[int, Conversation]
Prompt = Text | Messages


async def run(
    conversations: Sequence[Conversation],
    client: Client,
    *,
    concurrency: int = 0,
    stop: asyncio.Event | None = None,
    grace_s: float = 0.0,
    on_record: Callable[[Record], None] | None = None,
    on_sent: Callable[[], None] | None = None,
) -> RunResult:
    """Run all of them; ``concurrency`` 0 is the open loop, else ``at_s`` counts for nothing.

    In the closed loop a conversation is due when its place became free. A later turn is due
    ``think_s`` after the end of the answer before, and its prompt holds that answer. A turn that
    fails ends its conversation: the turns behind it are recorded as SKIPPED, with both hooks
    called, so that every planned request counts and no server gains by refusing a first turn.
    (NO_IDS instead, if the turns are token ids and the answer came without its own.)

    When ``stop`` is set nothing more is sent; what is in flight may still end within ``grace_s``,
    and is recorded as INTERRUPTED with the chunks it has if it does not. Raises ValueError, before
    anything is sent, for prompts that the endpoint does not take; and what a hook raises.
    """
    if concurrency < 0:
        raise ValueError(f"concurrency {concurrency}: 0 or more")
    for conversation in conversations:
        _check(conversation, client.is_chat)
    with _calm_collector():
        runner = _Runner(client, on_record, on_sent)
        await runner.run(conversations, concurrency, stop or asyncio.Event(), grace_s)
    return RunResult(
        records=tuple(sorted(runner.records, key=lambda record: record.index)),
        duration_s=runner.ended_s,
        started=runner.started.isoformat(timespec="milliseconds"),
        num_planned=sum(len(conversation.turns) for conversation in conversations),
        interrupted=runner.stopping,
    )


class _Runner:
    """One run: its clock, its counters, and its tasks."""

    def __init__(
        self,
        client: Client,
        on_record: Callable[[Record], None] | None,
        on_sent: Callable[[], None] | None,
    ) -> None:
        self.client, self.on_record, self.on_sent = client, on_record, on_sent
        self.records: list[Record] = []
        self.stopping = False
        self.started = datetime.now(UTC)
        self.ended_s = 0.0  # of the last answer
        self._zero = clock()
        self._num_due = 0
        self._tasks: set[asyncio.Task[None]] = set()  # each runs conversations
        self._thinking: set[asyncio.Task[None]] = set()  # those that wait for their next turn
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def now(self) -> float:
        """Seconds since the start of the run."""
        return clock() - self._zero

    async def run(
        self,
        conversations: Sequence[Conversation],
        concurrency: int,
        stop: asyncio.Event,
        grace_s: float,
    ) -> None:
        if concurrency:
            work = self._closed(enumerate(conversations), concurrency)
        else:
            work = self._open(sorted(enumerate(conversations), key=lambda pair: pair[1].at_s))
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(stop.wait())
        try:
            waited = (self._failed, working, stopped)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not working.done():
                await self._stop(working, grace_s)
        finally:
            tasks = (working, stopped, *self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in (self._failed, working):
            if outcome.done() and not outcome.cancelled():
                outcome.result()  # raises what went wrong in here

    async def _stop(self, working: asyncio.Task[None], grace_s: float) -> None:
        """Send nothing more; wait for what is in flight, but not longer than ``grace_s``."""
        self.stopping = True
        working.cancel()
        for task in tuple(self._thinking):
            task.cancel()
        await asyncio.sleep(0)  # these end
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)

    def _start(self, conversations: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(conversations)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    async def _open(self, conversations: Iterable[Numbered]) -> None:
        """Start each at its time; its request's bytes and a connection are ready by then."""
        for number, conversation in conversations:
            first = _prompt((), conversation.turns[0].text, self.client.is_chat)
            body = self._body(first, conversation, 0)
            await asyncio.sleep(max(0.0, conversation.at_s - AHEAD_S - self.now()))
            self.client.prepare()
            await asyncio.sleep(max(0.0, conversation.at_s - self.now()))
            self._start(self._converse(number, conversation, conversation.at_s, body))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _closed(self, conversations: Iterator[Numbered], places: int) -> None:
        """Keep ``places`` conversations going until there are no more."""

        async def place() -> None:
            for number, conversation in conversations:  # all places take from the same
                await self._converse(number, conversation, self.now())

        for _ in range(places):
            self._start(place())
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _converse(
        self, number: int, conversation: Conversation, due_s: float, body: bytes = b""
    ) -> None:
        """All turns of one conversation; ``body`` is the first one's request, if made already."""
        history: Prompt = ()
        num_tokens = 0
        ended_s = 0.0
        for position, turn in enumerate(conversation.turns):
            prompt = _prompt(history, turn.text, self.client.is_chat)
            body = body or self._body(prompt, conversation, position)
            if position:
                due_s = ended_s + turn.think_s
                await self._think(due_s)
            if self.stopping:
                return
            num_tokens += turn.num_tokens
            due = self._due(number, conversation, position, due_s, num_tokens)
            reply = await self._send(due, body)
            body, ended_s = b"", self.now()
            problem = self._unusable(reply, conversation, position)
            if problem and not self.stopping:
                self._skip(due, conversation, *problem)
            if problem:
                return
            history = _answered(prompt, reply, self.client.is_chat)
            num_tokens += reply.output_tokens

    async def _think(self, until_s: float) -> None:
        task = asyncio.current_task()
        assert task
        self._thinking.add(task)
        try:
            await asyncio.sleep(max(0.0, until_s - self.now()))
        finally:
            self._thinking.discard(task)

    async def _send(self, due: Record, body: bytes) -> Reply:
        if self.on_sent:
            self.on_sent()
        exchange = Exchange()
        try:
            await self.client.perform(exchange, body)
        except asyncio.CancelledError:
            exchange.fail(INTERRUPTED, "cut off by the load test")
            raise
        finally:
            reply = exchange.reply()
            self.ended_s = self.now()
            self._record(
                replace(
                    due,
                    sent_s=exchange.sent_s - self._zero,
                    error=reply.error,
                    message=reply.message,
                    prompt_tokens=reply.prompt_tokens or due.planned_tokens,
                    output_tokens=reply.output_tokens,
                    chunk_s=reply.chunk_s,
                )
            )
        return reply

    def _skip(self, failed: Record, conversation: Conversation, error: str, message: str) -> None:
        """Record the turns behind one that leaves them without a prompt; none of them is sent."""
        now, num_tokens = self.now(), failed.planned_tokens
        for position in range(failed.turn + 1, len(conversation.turns)):
            num_tokens += conversation.turns[position].num_tokens
            due = self._due(failed.conversation, conversation, position, now, num_tokens)
            if self.on_sent:
                self.on_sent()
            self._record(replace(due, error=error, message=message))

    def _due(
        self,
        number: int,
        conversation: Conversation,
        position: int,
        due_s: float,
        planned_tokens: int,
    ) -> Record:
        """The record of a request that is to be sent now."""
        self._num_due += 1
        return Record(
            index=self._num_due - 1,
            class_name=conversation.class_name,
            conversation=number,
            turn=position,
            due_s=due_s,
            sent_s=due_s,
            planned_tokens=planned_tokens,
            max_tokens=conversation.turns[position].max_tokens,
        )

    def _record(self, record: Record) -> None:
        self.records.append(record)
        if self.on_record:
            self.on_record(record)

    def _body(self, prompt: Prompt, conversation: Conversation, position: int) -> bytes:
        turns = conversation.turns
        goes_on = position + 1 < len(turns)
        want_ids = goes_on and not isinstance(turns[0].text, str)
        return self.client.body(prompt, turns[position].max_tokens, want_ids)

    def _unusable(
        self, reply: Reply, conversation: Conversation, position: int
    ) -> tuple[str, str] | None:
        """Why the next turn cannot be asked (kind, message); None if it can."""
        if reply.error:
            return SKIPPED, f"turn {position} failed: {reply.error}"
        goes_on = position + 1 < len(conversation.turns)
        if goes_on and not isinstance(conversation.turns[0].text, str) and not reply.token_ids:
            return NO_IDS, "the server ignores return_token_ids; ask it with words"
        return None


def _check(conversation: Conversation, is_chat: bool) -> None:
    """Raises ValueError for prompts that cannot be sent, or not be continued."""
    kinds = {isinstance(turn.text, str) for turn in conversation.turns}
    if is_chat and False in kinds:
        raise ValueError("a chat takes words, not token ids: use endpoint completions")
    if len(kinds) != 1:
        raise ValueError("a conversation's turns must be all words or all token ids, and not none")


def _prompt(history: Prompt, text: Text, is_chat: bool) -> Prompt:
    """What is sent: all that was said, and what is new."""
    if is_chat:
        return [*history, {"role": "user", "content": text}]
    if isinstance(text, str):
        said = history or ""
        assert isinstance(said, str)
        return f"{said} {text}" if said and not said[-1].isspace() else said + text
    return (*history, *text)


def _answered(prompt: Prompt, reply: Reply, is_chat: bool) -> Prompt:
    """What was said by now. The answer follows its prompt without a change to either."""
    if is_chat:
        return [*prompt, {"role": "assistant", "content": reply.text}]
    if isinstance(prompt, str):
        return prompt + reply.text
    return (*prompt, *reply.token_ids)


@contextlib.contextmanager
def _calm_collector() -> Iterator[None]:
    """Keep the garbage collector off all that exists already, and look only at what is young, and
    seldom: walking over more takes longer than the times that are measured.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*YOUNG_ONLY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
