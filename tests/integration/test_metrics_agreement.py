"""The router's metrics against a client that measures for itself.

Requests of every kind at once: streams and single answers, retries at each stage, clients that
leave, wrong ones, and more than the queue takes. ``--full`` sends a thousand of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest

from router.observation import FIRST_STAGES, SECOND_STAGES, Observation
from tests.integration.deployed import Deployment, deployed
from tests.integration.fake_worker import Answer
from tests.integration.measuring_client import Seen, ask
from tests.integration.paced_worker import STOPS_AFTER, Pace, PacedWorker
from tests.support.series import Series, bucket_of, quantile

PATH = "/v1/completions"
MIX = {
    "plain": 40,
    "whole": 8,  # not streamed
    "single": 6,  # one token
    "lose-prefill": 6,
    "lose-pull": 6,
    "lose-decode": 6,
    "doomed": 4,
    "stuck": 6,  # the client leaves before the first token
    "stops": 6,  # the client leaves in the stream
    "wrong": 4,
    "long": 4,
    "missing": 4,
}
"""Kinds of requests and their shares, in percent; see FATES for those that workers know."""
PACE = Pace(queue_s=0.01, prefill_s=0.05, pull_s=0.02, admit_s=0.005, step_s=0.012, spread=2.0)
TOKENS = 6
SEATS = 5  # of each of two decode workers
MAX_QUEUE = 10
AT_ONCE = 18  # all of them have a seat or a place in the queue
SLOW = {"slo_ttft_s": 10.0, "slo_tpot_s": 1.0}  # whoever is answered here is so in time
SHARES = (0.5, 0.9, 0.99)
CLOSE = 0.05


@dataclass
class Run:
    """What the client has seen, by kind, and what the router says."""

    seen: list[tuple[str, Seen]]
    heard: list[Observation]
    series: Series
    failures: Counter[str]

    def of(self, *kinds: str) -> list[Seen]:
        return [one for kind, one in self.seen if not kinds or kind in kinds]

    @property
    def streams(self) -> list[Seen]:
        """Those that had content."""
        return [one for one in self.of() if one.content_at]


def kinds(count: int, rng: random.Random) -> list[str]:
    """A shuffled list with each kind's share."""
    mix = [kind for kind, share in MIX.items() for _ in range(round(count * share / 100))]
    rng.shuffle(mix)
    return mix


async def send(port: int, pace: Pace, kind: str, number: int) -> Seen:
    """One request; the prompt's length is part of its pace."""
    prompt = f"{kind} {number} " + "x" * (number % 8)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 1 if kind == "single" else TOKENS,
        "ignore_eos": True,
        "stream": kind != "whole",
    }
    if kind != "whole":
        body["stream_options"] = {"include_usage": True}
    if kind == "wrong":
        body["temperature"] = 9
    if kind == "long":
        body["prompt"] = "x" * 600
    if kind == "missing":
        body["model"] = "another"
    return await ask(
        port,
        PATH,
        body,
        leave_after=STOPS_AFTER if kind == "stops" else None,
        leave_when=pace.reached(prompt).wait if kind == "stuck" else None,
    )


async def load(at: Deployment, pace: Pace, count: int) -> list[tuple[str, Seen]]:
    """``count`` requests, and at the end a crowd that the queue cannot take."""
    rng = random.Random(6)
    port = int(at.url.rsplit(":", 1)[1])
    todo = list(enumerate(kinds(count, rng)))
    seen: list[tuple[str, Seen]] = []

    async def client() -> None:
        while todo:
            number, kind = todo.pop()
            seen.append((kind, await send(port, pace, kind, number)))

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    crowd = [("crowd", number) for number in range(2 * (2 * SEATS + MAX_QUEUE))]
    answers = await asyncio.gather(*(send(port, pace, kind, number) for kind, number in crowd))
    return seen + [("crowd", one) for one in answers]


async def measure(count: int) -> Run:
    pace = replace(PACE, failures=Counter(), arrived={})

    def make(role: str, name: str, answer: Answer, **card: object) -> PacedWorker:
        return PacedWorker(role, name, answer, pace, **card)

    heard: list[Observation] = []
    async with deployed(
        roles="PPDD", make=make, max_num_seqs=SEATS, max_queue=MAX_QUEUE, **SLOW
    ) as at:
        at.front.requests.on_finished.append(heard.append)
        seen = await load(at, pace, count)
        async with asyncio.timeout(10):
            while len(at.front.requests):
                await asyncio.sleep(0.01)
        await at.idle()
        return Run(seen, heard, await Series.of(at.http), pace.failures)


@pytest.fixture(scope="module")
def run(full: bool) -> Run:
    async def main() -> Run:
        async with asyncio.timeout(240):
            return await measure(1000 if full else 100)

    return asyncio.run(main())


# --- counts: exactly ------------------------------------------------------------------------------


def test_requests_by_code(run: Run) -> None:
    seen = Counter(str(one.code) for one in run.of())
    assert run.series.by("baton_requests_total", "code") == seen
    assert run.series["baton_requests_total"] == len(run.seen) == len(run.heard)
    assert {"200", "400", "404", "429", "499"} <= seen.keys()
    assert seen.keys() & {"500", "503"}


def test_tokens(run: Run) -> None:
    answered = [one for one in run.of() if one.usage]
    left = run.of("stops")
    left = [one for one in left if one.left]
    assert left
    generated = sum(one.usage["completion_tokens"] for one in answered)
    generated += STOPS_AFTER * len(left)
    assert run.series["baton_generated_tokens_total"] == generated
    assert run.series["baton_request_generated_tokens_sum"] == generated
    began = answered + left
    assert run.series.count("baton_request_prompt_tokens") == len(began)
    heard = {one.request_id: one for one in run.heard}
    assert len([one for one in heard.values() if one.ttft_s is not None]) == len(began)
    prompts = sum(one.usage["prompt_tokens"] for one in answered)
    prompts += sum(one.prompt_tokens for one in run.heard if one.left_in == "decode")
    assert run.series["baton_prompt_tokens_total"] == prompts


def test_clients_that_left(run: Run) -> None:
    left = Counter(
        {
            "prefill": sum(one.left for one in run.of("stuck")),
            "decode": sum(one.left for one in run.of("stops")),
        }
    )
    assert run.series.by("baton_client_disconnects_total", "stage") == left
    assert all(left.values())


def test_rejections(run: Run) -> None:
    reasons = run.series.by("baton_admission_rejections_total", "reason")
    assert reasons == {
        "queue_full": sum(one.code == 429 for one in run.of()),
        "too_long": len(run.of("long")),
    }
    assert reasons["queue_full"] > 0


def test_retries(run: Run) -> None:
    """Each failure at a worker was followed by another attempt, or by an error for the client."""
    failed = sum(one.code >= 500 for one in run.of())
    assert run.series["baton_retries_total"] == run.failures.total() - failed
    for fate in ("lose-prefill", "lose-pull", "lose-decode"):
        answered = [one for one in run.of(fate) if one.code == 200]
        assert answered
        assert {one.tokens for one in answered} == {TOKENS}, fate


def test_what_goes_on_is_exactly_zero(run: Run) -> None:
    assert run.series["baton_requests_in_flight"] == 0
    assert run.series["baton_requests_queued"] == 0


def test_verdicts_are_those_of_the_client(run: Run) -> None:
    """Bad is who got no answer, for reasons of ours."""
    verdicts = {
        verdict: run.series.value("baton_slo_requests_total", slo="both", verdict=verdict)
        for verdict in ("good", "bad")
    }
    codes = Counter(one.code for one in run.of())
    left_in_time = sum(one.left for one in run.of("stops"))
    assert verdicts == {
        "good": codes[200] + left_in_time,
        "bad": codes[429] + codes[500] + codes[503],
    }


# --- times: within a bucket, sums within 5 % ------------------------------------------------------


@pytest.mark.parametrize("share", SHARES)
def test_ttft_agrees_within_one_bucket(run: Run, share: float) -> None:
    name = "baton_time_to_first_token_seconds"
    values = [one.ttft_s for one in run.streams]
    assert run.series.count(name, stream="true") == len(values)
    theirs = run.series.bucket_of(name, share, stream="true")
    assert abs(bucket_of(quantile(values, share), run.series.borders(name)) - theirs) <= 1


@pytest.mark.parametrize("share", SHARES)
def test_tpot_agrees_within_one_bucket(run: Run, share: float) -> None:
    name = "baton_time_per_output_token_seconds"
    values = [one.tpot_s for one in run.streams if one.tokens > 1]
    whole = [one for one in run.of("whole") if one.usage]
    assert run.series.count(name) == len(values) + len(whole)
    theirs = run.series.bucket_of(name, share)
    assert abs(bucket_of(quantile(values, share), run.series.borders(name)) - theirs) <= 1


def test_there_is_a_gap_for_each_chunk_after_the_first(run: Run) -> None:
    gaps = sum(len(one.content_at) - 1 for one in run.streams)
    gaps += sum(one.usage["completion_tokens"] - 1 for one in run.of("whole") if one.usage)
    assert run.series.count("baton_inter_token_latency_seconds") == gaps


def test_the_stages_of_the_first_token_sum_to_the_clients_ttft(run: Run) -> None:
    heard = [one for one in run.heard if one.ttft_s is not None]
    for one in heard:
        assert one.stages is not None
        assert sum(one.stages.values()) == pytest.approx(one.ttft_s, rel=1e-6)
    stages = sum(sum(one.stages.values()) for one in heard if one.stream and one.stages)
    client = sum(one.ttft_s for one in run.streams)
    assert stages == pytest.approx(client, rel=CLOSE)
    exported = sum(
        run.series.value("baton_stage_duration_seconds_sum", stage=stage) for stage in FIRST_STAGES
    )
    assert exported == pytest.approx(run.series["baton_time_to_first_token_seconds_sum"])


def test_the_stages_of_the_second_token_sum_to_the_clients_gap(run: Run) -> None:
    """Of those that one pair has served, and whose client has read two tokens."""
    heard = [one for one in run.heard if one.next_stages is not None]
    assert all(one.retries == 0 for one in heard)
    counted = run.series.by("baton_stage_duration_seconds_count", "stage")
    assert {counted[stage] for stage in SECOND_STAGES} == {len(heard)}
    streams = [sum(one.next_stages.values()) for one in heard if one.stream and one.next_stages]
    once = [
        one.content_at[1] - one.content_at[0]
        for one in run.of("plain", "stops", "crowd")
        if len(one.content_at) > 1
    ]
    assert len(streams) == len(once)
    assert sum(streams) == pytest.approx(sum(once), rel=CLOSE)


def test_stages_say_what_the_workers_did(run: Run) -> None:
    """Where the time went: medians are close to the script, and never below it."""
    once = [one for one in run.heard if one.next_stages is not None]
    for stage, least in (("kv_transfer", PACE.pull_s), ("decode_admit", PACE.admit_s)):
        found = median(one.next_stages[stage] for one in once if one.next_stages)
        assert 0.9 * least <= found <= 3 * least + 0.01, stage
    prefill = [one.stages["prefill"] for one in once if one.stages]
    assert PACE.prefill_s * 0.95 <= min(prefill)
    assert median(prefill) <= PACE.prefill_s * (1 + PACE.spread) + 0.02


def test_a_wrong_count_would_be_found(run: Run) -> None:
    """The comparison itself: what is off by one, or by two buckets, is not the same."""
    page = '# TYPE x counter\nx_total{code="200"} 2\n'
    assert Series(page).by("x_total", "code") != Counter({"200": 3})
    borders = run.series.borders("baton_time_to_first_token_seconds")
    ttft = quantile([one.ttft_s for one in run.streams], 0.5)
    assert abs(bucket_of(4 * ttft, borders) - bucket_of(ttft, borders)) > 1
