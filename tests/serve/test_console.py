"""The console in Chromium, under load: what is seen, that the chat streams, that it comes back.

Pictures in both themes, wide and on a phone, are left in ``build/console``. By default scripted
workers answer; ``pytest --full tests/serve/test_console.py`` takes one of each part as well, and
all of them once more in front of the default model in real engines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.console.feed import MAX_LISTENERS
from tests.serve.console_stage import Stage, real, scripted, stage
from tests.support.chromium import Browser, Page, chromium, need_chromium

PICTURES = Path(__file__).parents[2] / "build" / "console"
PARTS = (
    "ttft", "tpot", "goodput", "lanes", "chat", "workers", "roofline", "requests",
)  # fmt: skip
LIVE = "document.querySelector('#connection').dataset.state === 'live'"
ROWS = "document.querySelectorAll('#requests tbody tr').length"
SIZES = {"desktop": (1440, 900, False), "phone": (390, 844, True)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_chromium()
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def at(browser: Browser) -> Iterator[Stage]:
    with stage(scripted) as opened:
        opened.ask(3)
        yield opened


@pytest.fixture
def page(browser: Browser, at: Stage) -> Iterator[Page]:
    """An open console; whatever a test does with it, it complains of nothing and stays at home."""
    opened = browser.page()
    opened.goto(f"{at.url}/console")
    opened.until(LIVE)
    yield opened
    opened.close()
    assert opened.problems == []
    assert [url for url in opened.requests if not url.startswith(f"{at.url}/")] == []


def text_of(page: Page, selector: str) -> str:
    return str(page.js(f"document.querySelector({json.dumps(selector)}).innerText"))


# --- what is seen --------------------------------------------------------------------------------


def test_every_part_in_both_themes(at: Stage, page: Page, full: bool) -> None:
    at.begin_load(rate=5, words=(5, 90), tokens=(20, 90))
    try:
        page.until(f"{ROWS} > {50 if full else 12}", 60)
        pictures_of(page, PICTURES, PARTS if full else ())
        look_at_parts(page)
    finally:
        at.end_load()


def test_real_engines(browser: Browser, full: bool) -> None:
    if not full:
        pytest.skip("takes a minute: --full")
    with stage(real) as at:
        page = browser.page()
        page.goto(f"{at.url}/console")
        page.until(LIVE)
        at.begin_load(rate=0.35, words=(10, 150), tokens=(10, 50))
        try:
            page.until(f"{ROWS} > 20", 120)
            look_at_parts(page)
            pictures_of(page, PICTURES / "real", PARTS)
        finally:
            at.end_load()
            page.close()
        assert page.problems == []


def pictures_of(page: Page, folder: Path, parts: tuple[str, ...]) -> None:
    """Of the page and of ``parts``, in both themes, wide and on a phone."""
    for size, (width, height, phone) in SIZES.items():
        page.size(width, height, phone)
        if phone:  # as it is opened there
            page.call("Page.reload")
            page.until(f"{LIVE} && {ROWS} > 5")
        for theme in ("light", "dark"):
            page.media(prefers_color_scheme=theme)
            page.until(f"document.documentElement.dataset.theme === '{theme}'")
            page.js("new Promise(done => setTimeout(done, 600))")  # one more state is drawn
            page.shoot(folder / f"{size}-{theme}.png")
            for part in parts if size == "desktop" else ():
                page.shoot(folder / f"{part}-{theme}.png", f"#{part}")
            for canvas in ("ttft", "tpot", "goodput", "lanes", "roofline"):
                assert colours_in(page, canvas) > 3, f"{canvas} shows nothing"
        wide = page.js("document.scrollingElement.scrollWidth")
        assert wide <= width, f"{size}: {wide} CSS pixels wide"
    page.size(*SIZES["desktop"])


def look_at_parts(page: Page) -> None:
    """The same in words: figures, workers, ways over two pools."""
    for panel in ("ttft", "tpot"):
        figures = text_of(page, f"#{panel} .figures")
        assert "p95" in figures
        assert "s" in figures.replace("p50", "")
        assert "–" not in figures
    assert "SLO" in page.js("document.querySelector('#ttft canvas').ariaLabel")
    workers = text_of(page, "#workers")
    assert "Prefill" in workers
    assert "Decode" in workers
    assert "running" in workers
    way = page.until("document.querySelector('#requests td.way')?.innerText.includes('→')")
    assert way
    assert "FLOP/B" in page.js("document.querySelector('#roofline canvas').ariaLabel")
    assert page.js("document.querySelector('#lanes canvas').clientHeight") > 120


def colours_in(page: Page, part: str) -> int:
    """Different colours of a picture; an empty one has one."""
    return int(
        page.js(
            f"(() => {{ const c = document.querySelector('#{part} canvas');"
            "const k = new OffscreenCanvas(c.width, c.height)"
            ".getContext('2d', {willReadFrequently: true}); k.drawImage(c, 0, 0);"
            "const d = k.getImageData(0, 0, c.width, c.height).data;"
            "return new Set(new Uint32Array(d.buffer)).size; })()"
        )
    )


# --- what one does -------------------------------------------------------------------------------


def test_the_chat_streams(page: Page) -> None:
    page.press("/")
    assert page.js("document.activeElement.id") == "question"
    page.js("document.querySelector('#max-tokens').value = 60")
    page.js(
        "window.lengths = []; new MutationObserver(() => lengths.push("
        "document.querySelector('.talk .assistant .said')?.textContent.length || 0))"
        ".observe(document.querySelector('.talk'),"
        " {subtree: true, childList: true, characterData: true})"
    )
    page.type("How is a baton passed?")
    page.press("Enter")
    assert page.until("document.querySelector('#send').textContent === 'Stop'")
    page.until("document.querySelector('#send').textContent === 'Send'")
    assert text_of(page, ".talk .user .said") == "How is a baton passed?"
    answer = text_of(page, ".talk .assistant .said")
    assert answer.startswith("A baton is passed from hand to hand")
    lengths = sorted(set(page.js("lengths")) - {0})
    assert len(lengths) > 20, "it came in one piece"
    assert lengths[-1] == 60
    # What it cost, as the page measured it; and where it was, as the router tells.
    page.until("document.querySelector('.talk .note button')")
    note = text_of(page, ".talk .assistant .note")
    assert "first token" in note
    assert "60 tokens" in note
    assert "prefill-" in note
    assert "decode-" in note
    page.click(".talk .note button")
    detail = text_of(page, "#requests .one")
    for stage_name in ("prefill", "KV transfer", "decode", "first token"):
        assert stage_name in detail


def test_an_answer_is_stopped(page: Page) -> None:
    page.js("document.querySelector('#max-tokens').value = 1000")
    page.click("#question")
    page.type("Go on and on")
    page.press("Enter")
    page.until("(document.querySelector('.talk .assistant .said')?.textContent.length || 0) > 5")
    page.press("Escape")
    page.until("document.querySelector('#send').textContent === 'Send'")
    assert "stopped" in text_of(page, ".talk .assistant .note")
    page.until(
        "[...document.querySelectorAll('#requests td')].some(e => e.innerText === 'cancelled')"
    )
    page.until("document.querySelector('.talk .note button')?.innerText.includes('decode-')")


def test_errors_are_told(page: Page) -> None:
    page.js("document.querySelector('#temperature').max = 9")
    page.js("document.querySelector('#temperature').value = 9")
    page.click("#question")
    page.type("Too hot")
    page.press("Enter")
    page.until("document.querySelector('.talk .note.error')")
    assert "temperature" in text_of(page, ".talk .note.error")
    page.problems[:] = [p for p in page.problems if "400" not in p]  # the browser's own line


def test_the_keyboard(page: Page) -> None:
    page.press("t")
    first = page.js("document.documentElement.dataset.theme")
    page.press("t")
    assert page.js("document.documentElement.dataset.theme") != first
    page.press("p")
    assert page.js("document.querySelector('#connection').dataset.state") == "paused"
    page.press("p")
    page.until(LIVE)
    page.press("?")
    assert page.js("document.querySelector('#help-dialog').open")
    page.press("Escape")
    page.until("!document.querySelector('#help-dialog').open")
    page.until(f"{ROWS} > 1")
    page.press("k")
    chosen = "document.querySelector('#requests tr[aria-selected=true]')?.dataset.key"
    newest = page.until(chosen)
    page.press("k")
    assert page.js(chosen) != newest
    page.js("document.querySelector('#requests tr[aria-selected=true]').focus()")
    page.press("ArrowUp")
    assert page.js(chosen) == newest
    page.press("Escape")
    assert page.js(chosen) is None


def test_the_page_survives_a_restart_of_the_router(at: Stage, page: Page) -> None:
    """And the new one may ask for a key."""
    before = page.until(ROWS)
    at.stop_router()
    page.until("document.querySelector('#connection').dataset.state === 'lost'")
    assert page.js(ROWS) == before
    at.start_router(api_keys=("sésame",))
    try:
        page.until("document.querySelector('#key-dialog').open")
        for wrong in ("wrong", "schlüssel☃"):  # no header can carry a snowman as it is
            page.js("document.querySelector('#key-why').textContent = ''")
            page.type(wrong)
            page.press("Enter")
            page.until("document.querySelector('#key-why').innerText.includes('not accept')")
            page.until("document.querySelector('#key-dialog').open")
        page.type("sésame")
        page.press("Enter")
        page.until(LIVE)
        assert page.js(ROWS) >= before  # the new router knows nothing of them, the page does
        page.js("document.querySelector('#max-tokens').value = 8")
        page.click("#question")
        page.type("Still there?")
        page.press("Enter")
        page.until("document.querySelector('.talk .note button')")
    finally:
        at.stop_router()
        at.start_router()
    # What the browser says of refused connections, of a router that stops, and of a missing key.
    page.problems[:] = [p for p in page.problems if not re.search("net::ERR|401|503", p)]


def test_a_page_too_many_is_told_so(browser: Browser, at: Stage, page: Page) -> None:
    """A server that answers is not one that cannot be reached; the page waits for its turn."""
    one_too_many = browser.page()
    with at.listeners(MAX_LISTENERS - 1):
        one_too_many.goto(f"{at.url}/console")
        one_too_many.until("document.querySelector('#connection').dataset.state === 'lost'")
        said = text_of(one_too_many, "#connection")
        assert said == f"{MAX_LISTENERS} consoles are open already, trying again"
        one_too_many.click("#question")
        one_too_many.type("Is anybody there?")
        one_too_many.press("Enter")  # nothing is known of the model yet
        assert "Nothing was heard" in text_of(one_too_many, ".talk")
    one_too_many.until(LIVE)
    one_too_many.close()
    assert [p for p in one_too_many.problems if "503" not in p] == []


def test_a_key_that_is_needed_no_more(browser: Browser, at: Stage) -> None:
    """The page finds out by itself; and it asks once, not at each try."""
    is_open = "document.querySelector('#key-dialog').open"
    with told(browser, at, crowd(), locked=True) as page:
        page.until(is_open)
        page.press("Escape")
        page.until(f"!{is_open}")
        page.js("tries = 0")
        page.until("tries > 2")
        assert not page.js(is_open)
        page.js("document.dispatchEvent(new Event('keychange'))")
        page.until(is_open)
        page.js("locked = false")
        page.until(LIVE)
        assert not page.js(is_open)


def test_ids_and_names_of_any_length(browser: Browser, at: Stage) -> None:
    long = "x" * 120
    with told(browser, at, crowd(workers=[f"{r}-{long}" for r in ROLES], model=long)) as page:
        page.press("j")
        page.until("document.querySelector('#requests .one dl')")
        for width, height, phone in SIZES.values():
            page.size(width, height, phone)
            page.js("new Promise(done => setTimeout(done, 100))")
            assert page.js("document.scrollingElement.scrollWidth") <= width
            outside = page.js(
                "[...document.querySelectorAll('.panel')].filter(e => e.scrollWidth > e.clientWidth"
                " || [...e.querySelectorAll('*')].some(c => !c.closest('.scroll')"
                " && c.getBoundingClientRect().right > e.getBoundingClientRect().right + 1))"
                ".map(e => e.id)"
            )
            assert outside == []
        assert page.js("document.querySelector('.mark').clientWidth") == 24


def test_what_pools_should_have_and_why(browser: Browser, at: Stage) -> None:
    pools = {
        "prefill": {
            "target": 3, "actual": {"ready": 1}, "scales": True, "reason": "load",
            "words": "2.4 workers compute all the time at 1.9 prompts/s",
        },
        "decode": {
            "target": 0, "actual": {}, "scales": True, "reason": "start_failures",
            "words": "3 starts have failed in a row; the next is tried later",
        },
        "mixed": {"target": 0, "actual": {}, "scales": False, "reason": "", "words": ""},
    }  # fmt: skip
    failed = {
        "role": "decode", "worker": "decode-2", "reason": "exception", "in_a_row": 3,
        "message": "KV pool: 40.1 GiB are wanted, 12.0 are free", "seconds_ago": 12.0,
    }  # fmt: skip
    events = crowd()
    for event in events:
        event |= {"pools": pools, "start_failures": [failed]}
        event["workers"] = [one for one in event["workers"] if one["role"] == "prefill"]
    with told(browser, at, events) as page:
        for _ in ("light", "dark"):
            theme = page.js("document.documentElement.dataset.theme")
            page.shoot(PICTURES / f"scaling-{theme}.png", "#workers")
            page.press("t")
        said = "[...document.querySelectorAll('.pool')].map(e => e.innerText.split(/\\n+/))"
        prefill, decode = page.js(said)
        assert prefill[0].startswith("Prefill")
        head = " ".join(prefill[:2])
        assert "1 ready · target 3" in head
        assert "load: 2.4 workers compute all the time at 1.9 prompts/s" in prefill
        assert "no worker · target 0" in " ".join(decode[:2])
        assert decode[-2:] == [
            "start failures: 3 starts have failed in a row; the next is tried later",
            "the last 3 starts failed: KV pool: 40.1 GiB are wanted, 12.0 are free",
        ]


def test_many_requests(browser: Browser, at: Stage) -> None:
    """What is drawn is bounded, and where something is left out the page says so."""
    events = crowd(ended=128, live=64, in_flight=364, times=12)
    with told(browser, at, events) as page:
        note = "document.querySelector('#lanes .empty')"
        page.until(f"!{note}.hidden && {note}.innerText.startsWith('64 of the 364')")
        assert page.js(ROWS) == 60
        # All of them once more through a picture of our own: what was forgotten is not kept there.
        placed = in_page(
            page,
            "lanes.js",
            "Promise.all([m, import('/console/model.js')]).then(([{Lanes}, {Model}]) => {"
            " const model = new Model();"
            " const section = document.querySelector('#lanes').cloneNode(true);"
            " const lanes = new Lanes(section, model, new EventTarget());"
            " for (const event of said) { model.take('state', event); lanes.draw(event.t); }"
            " return [...lanes.placed.values()].map(all => all.size ?? all.length); })",
        )
        assert max(placed) <= 800 + 64
        assert page.js("said.reduce((sum, one) => sum + one.ended.length, 0)") == 12 * 128
        # Who is in the table with the keyboard stays there, though all its rows are others now.
        where = in_page(
            page,
            "requests.js",
            "Promise.all([m, import('/console/model.js')]).then(([{Requests}, {Model}]) => {"
            " const model = new Model();"
            " const section = document.querySelector('#requests').cloneNode(true);"
            " section.querySelector('tbody').replaceChildren();"
            " document.body.append(section);"
            " const table = new Requests(section, model, new EventTarget());"
            " const show = event => { model.take('state', event); table.update(); };"
            " const first = () => section.querySelector('tbody').firstChild;"
            " show(said[0]); first().focus(); show(said[1]);"
            " const found = document.activeElement === first(); section.remove(); return found; })",
        )
        assert where is True


# --- what it computes ----------------------------------------------------------------------------


ROLES = ("prefill", "decode")


@contextlib.contextmanager
def told(
    browser: Browser, at: Stage, events: list[dict[str, Any]], locked: bool = False
) -> Iterator[Page]:
    """A page that hears of nothing but these states, one after the other, and is live.

    ``locked``: it is told so until ``locked`` is false there, and its time goes 100 times as fast.
    """
    page = browser.page()
    page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source=f"window.said = {json.dumps(events)}; window.locked = {json.dumps(locked)};"
        " window.tries = 0; const after = setTimeout;"
        " if (locked) window.setTimeout = (f, ms, ...rest) => after(f, ms / 100, ...rest);"
        " window.fetch = async () => { tries += 1;"
        " if (locked) return new Response('', { status: 401 });"
        " const text = name => data => `event: ${name}\\ndata: ${JSON.stringify(data)}\\n\\n`;"
        " return new Response(new ReadableStream({ start(to) {"
        "  for (const one of said.map(text('state'))) to.enqueue(new TextEncoder().encode(one));"
        " } })); };",
    )
    page.goto(f"{at.url}/console")
    if not locked:
        page.until(f"{LIVE} && {ROWS} > 0")
    yield page
    page.close()
    assert page.problems == []


def crowd(
    workers: Sequence[str] = ("prefill-1", "decode-1"),
    model: str = "m",
    ended: int = 3,
    live: int = 1,
    in_flight: int = 1,
    times: int = 2,
) -> list[dict[str, Any]]:
    """States half a second after each other, in each of which so many have ended."""
    begun, noon = itertools.count(), 1_700_000_000.0
    kv_blocks = {"free": 400, "active": 60, "leased": 20, "quarantined": 12, "cached": 20}
    known = [
        {
            "id": name, "epoch": 1, "role": name.split("-")[0], "state": "ready", "stalled": False,
            "pid": 1, "host": "127.0.0.1", "port": 1, "transport": "tcp", "running": 1,
            "waiting": 0, "waiting_tokens": 0, "kv_blocks": 512, "blocks": kv_blocks,
            "generated_tokens": 0, "computed_prompt_tokens": 0, "pulled_bytes": 0, "flops": 0,
            "bytes": 0, "busy_s": 0, "peak_flops": 9e10, "peak_bytes": 1.9e10,
        }
        for name in workers
    ]  # fmt: skip
    prefill, decode = workers

    def request(at: float, end: float | None) -> dict[str, Any]:
        spans = [["queue", 0, 0.1, ""], ["prefill", 0.1, 0.2, prefill]]
        if end is not None:
            spans += [["transfer", 0.2, 0.21, decode], ["decode", 0.21, end, decode]]
        return {
            "id": f"{next(begun)}-{'y' * 110}", "at": at, "endpoint": "chat", "stream": True,
            "prompt": 9, "cached": 0, "tokens": 5, "choices": 1, "spans": spans, "retries": [],
            "ttft": 0.2, "tpot": None, "end": end, "code": 0 if end is None else 503,
            "error": "" if end is None else "z" * 300, "good": end and False,
        }  # fmt: skip

    return [
        {
            "t": t, "id": "router-1", "model": model, "slo": {"ttft": 1.0, "tpot": 0.1},
            "requests": {"in_flight": in_flight, "queued": 0}, "workers": known, "history": [],
            "now": {"window_s": 60, "ttft": None, "tpot": None, "good": 0, "judged": 0},
            "ended": [request(t - 1.5, 0.9) for _ in range(ended)],
            "live": [request(t - 1, None) for _ in range(live)], "live_most": 64,
        }
        for t in (noon + i / 2 for i in range(times))
    ]  # fmt: skip


def in_page(page: Page, module: str, expression: str) -> Any:
    return page.js(f"import('/console/{module}').then(m => {expression})")


def test_numbers(page: Page) -> None:
    for value, text in (
        (0.00123, "1.2 ms"), (0.0123, "12 ms"), (0.9, "900 ms"), (0.9996, "1.00 s"),
        (12.34, "12.3 s"), (120.4, "120 s"),
    ):  # fmt: skip
        assert in_page(page, "draw.js", f"m.seconds({value})") == text
    assert in_page(page, "draw.js", "m.seconds(null)") == "–"
    for value, text in ((0, "0"), (7, "7"), (7.5, "7.50"), (999.4, "999"), (1234, "1.23 k")):
        assert in_page(page, "draw.js", f"m.amount({value})") == text
    assert in_page(page, "draw.js", "m.amount(9e10, 'FLOP/s')") == "90.0 GFLOP/s"
    assert in_page(page, "draw.js", "m.logTicks(0.05, 3)") == [0.05, 0.1, 0.2, 0.5, 1, 2]
    x = in_page(page, "draw.js", "m.logScale(1, 100, 0, 200)(10)")
    assert math.isclose(x, 100)

    # Rates of a worker between two of its reports.
    first = {"t": 10, "generated": 100, "computed": 0, "pulled": 0, "flops": 1e9, "bytes": 1e8,
             "busy": 4}  # fmt: skip
    last = {"t": 20, "generated": 350, "computed": 50, "pulled": 1e6, "flops": 21e9, "bytes": 21e8,
            "busy": 9}  # fmt: skip
    rates = in_page(page, "model.js", f"m.ratesBetween({json.dumps(first)}, {json.dumps(last)})")
    assert rates == {
        "generated": 25, "computed": 5, "pulled": 1e5, "busy": 0.5, "flops": 4e9, "bytes": 4e8,
        "intensity": 10,
    }  # fmt: skip
    idle = in_page(
        page, "model.js", f"m.ratesBetween({json.dumps(first)}, {{...{json.dumps(first)}, t: 20}})"
    )
    assert (idle["intensity"], idle["flops"], idle["busy"]) == (0, 0, 0)
