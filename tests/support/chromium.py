"""Debian's Chromium without a window, driven over a pipe by its own protocol (CDP).

Needs the package ``chromium`` (``apt-get install chromium``): without it a test skips and says so,
and in CI it fails. It resolves no name but 127.0.0.1, so that a page that asks another host for
anything cannot get it; what it asks for is kept in ``Page.requests``.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-default-apps", "--mute-audio", "--hide-scrollbars",
    "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)  # fmt: skip
ANSWER_S = 30
STOP_S = 10
KEYS = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}


def need_chromium() -> str:
    """Its path; skips the test where it is not installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        text = "needs chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return path


class Browser:
    """A running Chromium. Commands are answered in order of their ids, events go to their page."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._out = os.fdopen(write_fd, "wb", buffering=0)
        self._in = os.fdopen(read_fd, "rb")
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a command; AssertionError when it fails."""
        number = next(self._ids)
        answer = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        try:
            found = answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"no answer to {method} within {ANSWER_S} s") from None
        finally:
            del self._answers[number]
        assert "error" not in found, f"{method}: {found.get('error')}"
        result: dict[str, Any] = found["result"]
        return result

    def page(self, width: int = 1440, height: int = 900) -> Page:
        """A new, empty page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height)
        return page

    def close(self) -> None:
        """Let it end by itself."""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        self._out.close()
        self._reader.join(STOP_S)
        self._in.close()

    def _read(self) -> None:
        rest = b""
        while part := self._in.read1(1 << 16):  # type: ignore[attr-defined]
            *whole, rest = (rest + part).split(b"\0")
            for raw in whole:
                message = json.loads(raw)
                if "id" in message:
                    if (answer := self._answers.get(message["id"])) is not None:
                        answer.put(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.on_event(message["method"], message["params"])


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.problems: list[str] = []  # errors and warnings that the page has logged
        self.requests: list[str] = []  # every URL that it has asked for
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Called from the browser's thread."""
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                said = details.get("exception", {}).get("description", details["text"])
                self.problems.append(said)
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def goto(self, url: str) -> None:
        """Load a page; :meth:`until` says when it is there."""
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """Of the window, in CSS pixels; a phone has twice as many and a finger."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def media(self, **features: str) -> None:
        """What the system prefers: ``prefers_color_scheme="dark"``."""
        wanted = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + timeout_s
        tick = threading.Event()
        while True:
            with contextlib.suppress(AssertionError):  # as long as the page is being loaded
                # An element has no value outside of the page.
                if value := self.js(f"(found => found instanceof Node || found)({expression})"):
                    return value
            assert time.monotonic() < end, f"not within {timeout_s:g} s: {expression}"
            tick.wait(0.05)

    def type(self, text: str) -> None:
        """Text where the cursor is, as from a keyboard that sends it at once."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """One key: a character, or a name of ``KEYS``."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """The middle of an element, by the mouse."""
        point = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.mouse("mousePressed", *point)
        self.mouse("mouseReleased", *point)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """mouseMoved | mousePressed | mouseReleased, at a place in the window."""
        button = "none" if kind == "mouseMoved" else "left"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def shoot(self, path: Path, selector: str = "") -> None:
        """A picture of an element, or of the whole page."""
        clip = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector or 'html')});"
            "const b = e.getBoundingClientRect();"
            "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width,"
            " height: Math.max(b.height, e.scrollHeight), scale: 1}; })()"
        )
        found = self.call(
            "Page.captureScreenshot",
            format="png", clip=clip, captureBeyondViewport=True, optimizeForSpeed=True,
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    command = need_chromium()
    commands_in, commands_out = os.pipe()
    answers_in, answers_out = os.pipe()
    # It reads from descriptor 3 and writes to 4; a shell puts ours there.
    wiring = f'exec "$0" "$@" 3<&{commands_in} 4>&{answers_out}'
    with tempfile.TemporaryDirectory(
        prefix="baton-chromium-", ignore_cleanup_errors=True
    ) as profile:
        process = subprocess.Popen(
            ["bash", "-c", wiring, command, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands_in, answers_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_in)
        os.close(answers_out)
        browser = Browser(answers_in, commands_out)
        try:
            yield browser
        finally:
            browser.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
