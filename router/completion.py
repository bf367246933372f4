"""From the ids of an answer to what the client reads: text, finish reason, usage, chunks.

Knows the shapes of the OpenAI API and nothing of HTTP; ``router.dispatch`` makes the ids.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.job import Chunk, Enough, GenRequest
from router.marks import Marks
from router.tokenizer import Detokenizer

Generate = Callable[[GenRequest, Marks], AsyncGenerator[Chunk, None]]

Wrote = Callable[[int, bool], None]
"""(index of a choice, whether it is finished): something of it is with the client."""


@dataclass
class Choice:
    """One answer that is being made. ``push`` takes chunks until there is a ``finish``."""

    index: int
    request: GenRequest
    detokenizer: Detokenizer
    include_stop: bool = False
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id, eos excepted
    cached_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    marks: Marks = field(default_factory=Marks)  # what happens to it when

    def push(self, chunk: Chunk) -> Delta:
        """Take new ids; what they add to the answer."""
        if not self.ids:
            self.cached_tokens = chunk.cached_tokens
        ids = chunk.ids
        hidden = self._ends_with_stop_id(chunk) and not self.include_stop
        text = self.detokenizer.push(ids[:-1] if hidden else ids)
        if self.detokenizer.stopped is not None:
            ids = ids[: self.detokenizer.num_tokens - len(self.ids)]
            self.finish, self.stop_reason = "stop", self.detokenizer.stopped
        elif chunk.finish:
            text += self.detokenizer.finish()
            self.finish = chunk.finish
            if self.detokenizer.stopped is not None:  # completed by what was held back
                self.finish, self.stop_reason = "stop", self.detokenizer.stopped
            elif self._ends_with_stop_id(chunk) and ids[-1] not in self.eos_ids:
                self.stop_reason = ids[-1]
        self.ids += ids
        self.text += text
        return Delta(self, text, ids, self.finish, self.stop_reason)

    def _ends_with_stop_id(self, chunk: Chunk) -> bool:
        return (
            chunk.finish == "stop"
            and bool(chunk.ids)
            and chunk.ids[-1] in self.request.sampling.stop_ids
        )


@dataclass(frozen=True)
class Delta:
    """What one chunk added to a choice, which may be further on already."""

    choice: Choice
    text: str
    ids: Sequence[int]
    finish: str | None
    stop_reason: str | int | None


async def run_choices(generate: Generate, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    """All choices at once; ends when each has finished. Closing it closes them all."""
    if len(choices) == 1:
        running = _run_choice(generate, choices[0])
        try:
            async for delta in running:
                yield delta
        finally:
            await running.aclose()
        return
    results: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(generate, choice, results)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            result = await results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                left -= 1
            else:
                yield result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_choice(generate: Generate, choice: Choice) -> AsyncGenerator[Delta, None]:
    chunks = generate(choice.request, choice.marks)
    try:
        async for chunk in chunks:
            yield choice.push(chunk)
            if choice.finish:
                with contextlib.suppress(StopAsyncIteration, Enough):
                    await chunks.athrow(Enough())
                return
    finally:
        await chunks.aclose()


async def _pump(
    generate: Generate,
    choice: Choice,
    results: asyncio.Queue[Delta | BaseException | None],
) -> None:
    deltas = _run_choice(generate, choice)
    try:
        async for delta in deltas:
            results.put_nowait(delta)
        results.put_nowait(None)
    except Exception as error:  # to be raised where the choices come together
        results.put_nowait(error)
    finally:
        await deltas.aclose()


# --- shapes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What all chunks and the response of one HTTP request have in common."""

    id: str
    chat: bool
    model: str
    created: int  # seconds since 1970
    choices: Sequence[Choice]
    prompts: Sequence[Sequence[int]]  # [prompt][token id]; choice i answers prompt i // n
    n: int
    return_token_ids: bool

    def usage(self) -> dict[str, Any]:
        """Tokens in and out. What counts as cached is what the prefill side did not compute."""
        prompt = sum(map(len, self.prompts))
        completion = sum(len(choice.ids) for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def response(self) -> dict[str, Any]:
        """The whole answer."""
        entries = []
        for choice in self.choices:
            entry: dict[str, Any] = {"index": choice.index}
            if self.chat:
                entry["message"] = {"role": "assistant", "content": choice.text}
            else:
                entry["text"] = choice.text
            entries.append(entry | self._end(choice, choice.ids))
            if self.return_token_ids and not self.chat:
                entries[-1]["prompt_token_ids"] = self._prompt_of(choice)
        body = self._body("chat.completion" if self.chat else "text_completion", entries)
        if self.return_token_ids and self.chat:
            body["prompt_token_ids"] = list(self.prompts[0])
        return body | {"usage": self.usage()}

    def role_chunk(self, choice: Choice) -> dict[str, Any]:
        """The first chunk of a choice in a chat's stream."""
        entry = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        body = self._body("chat.completion.chunk", [entry])
        if self.return_token_ids:
            body["prompt_token_ids"] = list(self.prompts[0])
        return body

    def chunk(self, delta: Delta, first: bool) -> dict[str, Any]:
        """One chunk of a stream. ``first``: of its choice."""
        choice = delta.choice
        entry: dict[str, Any] = {"index": choice.index}
        if self.chat:
            entry["delta"] = {"content": delta.text} if delta.text else {}
        else:
            entry["text"] = delta.text
        entry |= self._end(delta, delta.ids)
        if self.return_token_ids and first and not self.chat:
            entry["prompt_token_ids"] = self._prompt_of(choice)
        return self._body("chat.completion.chunk" if self.chat else "text_completion", [entry])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that was asked for usage."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._body(kind, []) | {"usage": self.usage()}

    def _end(self, of: Choice | Delta, ids: Iterable[int]) -> dict[str, Any]:
        entry: dict[str, Any] = {"logprobs": None, "finish_reason": of.finish}
        if of.finish:
            entry["stop_reason"] = of.stop_reason
        if self.return_token_ids:
            entry["token_ids"] = list(ids)
        return entry

    def _prompt_of(self, choice: Choice) -> list[int]:
        return list(self.prompts[choice.index // self.n])

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def stream(
    reply: Reply,
    deltas: AsyncGenerator[Delta, None],
    include_usage: bool,
    usage_always: bool,
    wrote: Wrote,
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream, without framing and ``[DONE]``; one for each token that shows.

    Takes ``deltas`` over, and closes them. Whoever reads has to send a chunk before it asks for the
    next one: then ``wrote`` is called.
    """
    begun: set[int] = set()

    def with_usage(body: dict[str, Any]) -> dict[str, Any]:
        if include_usage:
            body["usage"] = reply.usage() if usage_always else None
        return body

    try:
        async for delta in deltas:
            first = delta.choice.index not in begun
            begun.add(delta.choice.index)
            if first and reply.chat:
                yield with_usage(reply.role_chunk(delta.choice))
            if delta.text or delta.finish or reply.return_token_ids:
                yield with_usage(reply.chunk(delta, first))
                wrote(delta.choice.index, bool(delta.finish))
        if include_usage:
            yield reply.usage_chunk()
    finally:
        await deltas.aclose()
