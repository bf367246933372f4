"""One HTTP request of a client that watches the server's contract, and may leave on purpose.

A stream must end with a finish reason for each choice and ``[DONE]``, or with one error and
``[DONE]``; anything else is told apart here: a reset, a silence past the deadline, a
broken contract.
Does not know what the right answer is.
"""

import http.client
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.questions import Cut

# How a request may end
ANSWERED, FAILED, CUT, RESET, HANG, BROKEN = "answered", "error", "cut", "reset", "hang", "broken"


@dataclass
class Choice:
    """What came for one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


@dataclass
class Reply:
    """How a request ended, and what came until then."""

    end: str = ""
    status: int = 0  # 0: no HTTP answer at all
    note: str = ""
    prompt_ids: list[int] | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    router: bool = False  # an error of our own, not of Serve or HAProxy


class _Left(Exception):
    """We have closed the connection ourselves."""


def send(
    url: str, path: str, body: dict[str, Any], label: str, deadline_s: float, cut: Cut | None = None
) -> Reply:
    """Send a request and see what comes of it. Raises nothing: every end is in the reply."""
    exchange = _Exchange(url, deadline_s, cut)
    reply = exchange.reply
    try:
        exchange.run(path, body, label)
    except _Left:
        reply.end = CUT
    except TimeoutError:
        if cut is not None and not exchange.late:
            reply.end = CUT
        else:
            reply.end, reply.note = HANG, f"nothing for {deadline_s:.0f} s"
    except (OSError, http.client.HTTPException) as error:
        reply.end, reply.note = RESET, repr(error)
    finally:
        exchange.close()
    return reply


class _Exchange:
    def __init__(self, url: str, deadline_s: float, cut: Cut | None) -> None:
        parts = urlsplit(url)
        self.reply = Reply()
        self._cut = cut
        self._deadline = time.monotonic() + deadline_s
        self._cut_at = time.monotonic() + cut.after_s if cut else self._deadline
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, deadline_s)
        self._sock: socket.socket | None = None

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._deadline

    def run(self, path: str, body: dict[str, Any], label: str) -> None:
        self._http.connect()
        self._sock = self._http.sock
        headers = {"Content-Type": "application/json", "X-Request-Id": label}
        self._http.request("POST", path, json.dumps(body), headers)
        self._wait()
        response = self._http.getresponse()
        self.reply.status = response.status
        kind = response.headers.get("content-type", "")
        if response.status == 200 and kind.startswith("text/event-stream"):
            self._stream(response, body.get("n", 1))
        else:
            self._whole(response)

    def close(self) -> None:
        cut = self.reply.end == CUT and self._cut is not None and self._cut.hard
        if self._sock is not None and self._sock.fileno() >= 0 and cut:  # not closed by http.client
            off_and_zero = struct.pack("ii", 1, 0)  # the kernel sends a reset instead of a FIN
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off_and_zero)
        self._http.close()
        if self._sock is not None:
            self._sock.close()

    def _wait(self) -> None:
        """What is read next may take until the deadline, or until we leave."""
        left = min(self._deadline, self._cut_at) - time.monotonic()
        if left <= 0:
            raise TimeoutError
        assert self._sock is not None
        self._sock.settimeout(left)

    def _whole(self, response: http.client.HTTPResponse) -> None:
        self._wait()
        raw, reply = response.read(), self.reply
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if response.status != 200:
            reply.end = FAILED
            own = isinstance(body, dict) and isinstance(body.get("error"), dict)
            reply.router = own
            reply.note = str(body["error"].get("message") if own else raw[:200])
            return
        if not isinstance(body, dict) or "choices" not in body:
            reply.end, reply.note = BROKEN, f"200 with {raw[:200]!r}"
            return
        self._take(body)
        reply.end = ANSWERED

    def _stream(self, response: http.client.HTTPResponse, num_choices: int) -> None:
        reply, errors, done, events = self.reply, 0, False, 0
        while True:
            self._wait()
            line = response.readline()
            if not line:
                break
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if done:
                reply.end, reply.note = BROKEN, "an event after [DONE]"
                return
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                errors += 1
                reply.router, reply.note = True, str(event["error"].get("message"))
            else:
                self._take(event)
            events += 1
            if self._cut and events >= self._cut.after_events:
                raise _Left
        finished = [c for c in reply.choices.values() if c.finish]
        complete = len(finished) == num_choices and not errors
        if not done:
            reply.end, reply.note = RESET, "the stream ended without [DONE]"
        elif complete or errors == 1:
            reply.end = ANSWERED if complete else FAILED
        else:
            reply.end = BROKEN
            reply.note = f"[DONE] after {len(finished)} of {num_choices} choices, {errors} errors"

    def _take(self, body: dict[str, Any]) -> None:
        """Choices of a whole answer or of a chunk of one."""
        if body.get("prompt_token_ids"):
            self.reply.prompt_ids = body["prompt_token_ids"]
        for entry in body["choices"]:
            choice = self.reply.choices.setdefault(entry["index"], Choice())
            part = entry.get("message") or entry.get("delta") or {"content": entry.get("text")}
            choice.text += part.get("content") or ""
            choice.ids += entry.get("token_ids") or []
            choice.finish = entry.get("finish_reason") or choice.finish
            if entry.get("prompt_token_ids"):
                self.reply.prompt_ids = entry["prompt_token_ids"]
