"""What the router counts of real HTTP requests, in every way that they can end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import pytest
from prometheus_client import generate_latest

from router import connection, wire, worker as worker_module
from router.link import Link
from router.observation import FIRST_STAGES, SECOND_STAGES, Observation
from router.vllm_names import router_view
from tests.integration.deployed import Deployment, deployed, run
from tests.integration.fake_worker import MODEL
from tests.integration.measuring_client import Seen, ask
from tests.integration.paced_worker import Pace, PacedWorker
from tests.support.series import Series, bucket_of, quantile

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = {"prompt": "hello there", "max_tokens": 5, "ignore_eos": True}
STREAM = {**BODY, "stream": True}
QUANTILES = (0.5, 0.9, 0.99)


def port_of(at: Deployment) -> int:
    return int(at.url.rsplit(":", 1)[1])


async def over(at: Deployment) -> None:
    """Until every request has ended for the router as well."""
    async with asyncio.timeout(10):
        while len(at.front.requests) or at.dispatcher.num_jobs:
            await asyncio.sleep(0.005)


async def outcomes(at: Deployment) -> dict[str, float]:
    """Requests by type of error."""
    await over(at)
    return (await Series.of(at.http)).by("baton_requests_total", "error_type")


def paced(pace: Pace, roles: str = "PD", **config: Any) -> Any:
    return deployed(roles=roles, make=partial(_make, pace), **config)


def _make(pace: Pace, role: str, name: str, answer: Any, **card: object) -> PacedWorker:
    return PacedWorker(role, name, answer, pace, **card)


# --- idle -----------------------------------------------------------------------------------------

ALWAYS = (
    "baton_slo_objective_seconds", "baton_workers", "baton_autoscale_replicas",
    "baton_process_start_time_seconds",
)  # fmt: skip


@pytest.mark.parametrize("roles", ["PD", "M"])
def test_proofs_are_not_counted_and_idle_is_zero(roles: str) -> None:
    async def scenario() -> None:
        async with deployed(roles=roles) as at:
            assert at.dispatcher.ready, "a pair was proven by a real generation"
            series = await Series.of(at.http)
            for name in series._samples:
                if not name.startswith((*ALWAYS, "baton_event_loop_lag_seconds")):
                    assert series[name] == 0, name
            ready = {"prefill": 1.0, "decode": 1.0} if roles == "PD" else {"mixed": 1.0}
            assert series.by("baton_workers", "role", state="ready") == ready
            assert series["baton_workers"] == len(roles)
            assert series.by("baton_autoscale_replicas", "role", kind="actual") == ready
            assert (await at.post(PATH, BODY)).status_code == 200
            await over(at)
            series = await Series.of(at.http)
            assert series["baton_requests_total"] == 1
            for gauge in ("in_flight", "queued"):
                assert series[f"baton_requests_{gauge}"] == 0

    run(scenario)


# --- each outcome ---------------------------------------------------------------------------------


def test_a_request_that_is_answered() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            at.p.cached_tokens = 3
            for path, stream in product((PATH, CHAT), (False, True)):
                body: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "stream": stream}
                body |= {"prompt": "hello"} if path == PATH else {"messages": MESSAGES}
                before = await Series.of(at.http)
                seen = await ask(port_of(at), path, body)
                await over(at)
                check_answered((await Series.of(at.http)).since(before), path, stream, seen)

    run(scenario)


def check_answered(series: Series, path: str, stream: bool, seen: Seen) -> None:
    """What one request of five tokens, three of its prompt cached, adds."""
    endpoint = "chat" if path == CHAT else "completions"
    labels = {"endpoint": endpoint, "stream": str(stream).lower(), "code": "200"}
    assert series.value("baton_requests_total", **labels, error_type="") == 1
    assert series["baton_requests_total"] == 1
    assert series.count("baton_request_duration_seconds", code="200") == 1
    name = "baton_time_to_first_token_seconds"
    assert series.by(f"{name}_count", "stream") == {labels["stream"]: 1}
    assert series.count("baton_time_per_output_token_seconds") == 1
    assert series.count("baton_inter_token_latency_seconds") == 4
    assert series["baton_generated_tokens_total"] == 5
    assert series["baton_cached_prompt_tokens_total"] == 3
    assert series["baton_prompt_tokens_total"] > 3
    if not stream:
        assert series["baton_prompt_tokens_total"] == seen.usage["prompt_tokens"]
    assert series["baton_request_generated_tokens_sum"] == 5
    assert series.by("baton_route_decisions_total", "decision") == {"disagg": 1}
    assert series.count("baton_route_overhead_seconds") == 1
    assert series.by("baton_slo_requests_total", "verdict") == {"good": 3}
    counts = series.by("baton_stage_duration_seconds_count", "stage")
    assert counts == dict.fromkeys(FIRST_STAGES + SECOND_STAGES, 1)


MESSAGES = [{"role": "user", "content": "hello"}]


WRONG: list[tuple[dict[str, Any], dict[str, str], int, str, str]] = [
    ({**BODY, "temperature": 9}, {}, 400, "validation", ""),
    ({**BODY, "model": "another"}, {}, 404, "not_found", ""),
    ({**STREAM, "model": "another"}, {}, 404, "not_found", ""),
    ({**STREAM, "temperature": 9}, {}, 400, "validation", ""),
    ({**STREAM, "frequency_penalty": "much"}, {}, 400, "validation", ""),
    ({**BODY, "prompt": "x" * 600}, {}, 400, "validation", "too_long"),
    ({**BODY, "prompt": "x" * 4000}, {}, 413, "too_large", ""),
    (BODY, {"content-type": "text/plain"}, 400, "validation", ""),
    (STREAM, {"authorization": "Bearer wrong"}, 401, "unauthorized", ""),
]
"""(body, headers, status, type of error, why it was rejected)"""


def test_requests_that_are_wrong() -> None:
    async def scenario() -> None:
        async with deployed(max_body_bytes=3000, api_keys=("right",)) as at:
            at.http.headers["authorization"] = "Bearer right"
            for body, headers, code, kind, rejected in WRONG:
                before = await Series.of(at.http)
                response = await at.post(PATH, body, headers=headers)
                assert response.status_code == code, response.text
                await over(at)
                series = (await Series.of(at.http)).since(before)
                read = code not in (401, 413) and "content-type" not in headers
                stream = "true" if body.get("stream") and read else "false"
                labels = {"endpoint": "completions", "stream": stream, "error_type": kind}
                assert series.value("baton_requests_total", code=str(code), **labels) == 1
                assert series["baton_requests_total"] == 1
                assert series.count("baton_request_duration_seconds", code=str(code)) == 1
                reasons = series.by("baton_admission_rejections_total", "reason")
                assert reasons == ({rejected: 1} if rejected else {})
                assert series["baton_slo_requests_total"] == 0
                assert series.count("baton_time_to_first_token_seconds") == 0
            # What is not for tokens is not counted at all.
            before = await Series.of(at.http)
            assert (await at.http.get(PATH)).status_code == 405
            assert (await at.post("/v1/embeddings", {})).status_code == 404
            assert (await at.post("/tokenize", {"prompt": "x"})).status_code == 200
            assert (await Series.of(at.http)).since(before)["baton_requests_total"] == 0

    run(scenario)


def test_a_full_queue_and_a_queue_that_takes_too_long() -> None:
    async def scenario() -> None:
        pace = Pace()
        limits = {"max_queue": 1, "queue_timeout_s": 1.5, "slo_ttft_s": 30.0}
        async with paced(pace, max_num_seqs=1, **limits) as at:
            holding = asyncio.ensure_future(
                ask(port_of(at), PATH, {**STREAM, "prompt": "stuck one"}, leave_when=ended.wait)
            )
            await pace.reached("stuck one").wait()
            waiting = asyncio.ensure_future(at.post(PATH, BODY))
            async with asyncio.timeout(5):
                while (await Series.of(at.http))["baton_requests_queued"] != 1:
                    await asyncio.sleep(0.005)
            assert (await Series.of(at.http))["baton_requests_in_flight"] == 2
            assert vllms(at) == {"running": 1, "waiting": 1}, "none is both"
            assert (await at.post(PATH, STREAM)).status_code == 429
            assert (await waiting).status_code == 429
            ended.set()
            await holding
            await over(at)
            series = await Series.of(at.http)
            reasons = series.by("baton_admission_rejections_total", "reason")
            assert reasons == {"queue_full": 1, "queue_timeout": 1}
            by_kind = series.by("baton_requests_total", "error_type")
            assert by_kind == {"overload": 2, "cancelled": 1}
            assert series.by("baton_client_disconnects_total", "stage") == {"prefill": 1}
            assert series["baton_requests_queued"] == series["baton_requests_in_flight"] == 0
            assert vllms(at) == {"running": 0, "waiting": 0}
            # Refused for lack of room is bad; the one that left had not waited for long.
            assert series.by("baton_slo_requests_total", "slo") == {"ttft": 2, "both": 2}
            assert series.by("baton_slo_requests_total", "verdict") == {"bad": 4}

    ended = asyncio.Event()
    run(scenario)


def vllms(at: Deployment) -> dict[str, float]:
    """vLLM's gauges of requests, of this router."""
    settings = replace(at.front._settings, metrics_compat="vllm")
    shown = router_view(settings, at.front.metrics.registry, at.dispatcher)
    series = Series(generate_latest(shown).decode())
    return {state: series[f"vllm:num_requests_{state}"] for state in ("running", "waiting")}


def test_no_workers_and_a_deadline() -> None:
    async def scenario() -> None:
        async with deployed(request_timeout_s=0.3, comeback_s=0.05) as at:
            at.p.hook = lambda link, message: isinstance(message, wire.Prefill)
            assert (await at.post(PATH, BODY)).status_code == 504
            at.p.hook = None
            at.p.die()
            at.d.die()
            async with asyncio.timeout(5):
                while at.dispatcher.ready:
                    await asyncio.sleep(0.01)
            assert (await at.post(PATH, BODY)).status_code == 503
            assert await outcomes(at) == {"deadline": 1, "unavailable": 1}
            series = await Series.of(at.http)
            reasons = series.by("baton_admission_rejections_total", "reason")
            assert reasons == {"no_workers": 1}
            losses = series.by("baton_worker_losses_total", "role", reason="closed")
            assert losses == {"prefill": 1, "decode": 1}
            assert series.by("baton_workers", "state") == {"dead": 2}

    run(scenario)


def test_a_stream_that_breaks_counts_by_its_error() -> None:
    async def scenario() -> None:
        async with paced(Pace(), roles="M") as at:
            # The only worker fails after a token, and nobody is left to go on.
            seen = await ask(port_of(at), PATH, {**STREAM, "prompt": "lose-decode x"})
            assert (seen.status, seen.code) == (200, 503)
            await over(at)
            series = await Series.of(at.http)
            labels = {"stream": "true", "code": "503", "error_type": "unavailable"}
            assert series.value("baton_requests_total", **labels) == 1
            assert series["baton_requests_total"] == 1
            assert series["baton_generated_tokens_total"] == 1
            bad = series.by("baton_slo_requests_total", "slo", verdict="bad")
            assert bad == {"tpot": 1, "both": 1}
            assert series.value("baton_slo_requests_total", slo="ttft", verdict="good") == 1

    run(scenario)


def test_b103_each_outcome_is_counted_once() -> None:
    """B103: 10 answered, 10 aborted before token 1, 10 aborted in the stream, 5 wrong, 5 failed."""

    async def scenario() -> None:
        pace = Pace()
        async with paced(pace, max_num_seqs=64) as at:
            port = port_of(at)
            before = await Series.of(at.http)
            sent = [ask(port, PATH, STREAM) for _ in range(10)]
            for index in range(10):
                prompt = f"stuck {index}"
                left = pace.reached(prompt).wait
                sent.append(ask(port, PATH, {**STREAM, "prompt": prompt}, leave_when=left))
            stops = {**STREAM, "prompt": "stops x", "max_tokens": 50}
            sent += [ask(port, PATH, stops, leave_after=3) for _ in range(10)]
            sent += [ask(port, PATH, {**STREAM, "temperature": 9}) for _ in range(5)]
            doomed = {**STREAM, "prompt": "doomed x"}
            sent += [ask(port, PATH, doomed) for _ in range(5)]
            seen = await asyncio.gather(*sent)
            failed = [one.code for one in seen if one.code >= 500]
            assert len(failed) == 5
            by_kind = await outcomes(at)
            kind = {500: "internal", 503: "unavailable"}[failed[0]]
            assert by_kind == {"": 10, "cancelled": 20, "validation": 5, kind: 5}
            series = await Series.of(at.http)
            assert series["baton_requests_total"] == len(seen) == 40
            assert series.by("baton_client_disconnects_total", "stage") == {
                "prefill": 10, "decode": 10,
            }  # fmt: skip
            assert series.labels() == before.labels(), "a series began with its first event"
            await at.idle()

    run(scenario)


# --- times ----------------------------------------------------------------------------------------


def test_b104_histograms_have_a_value_for_each_request() -> None:
    """B104: 200 ms to prefill, 50 ms a token; 50 requests of 10 tokens, and 5 of a single one.

    On a machine that is busy with other things all is later, but never more than for the client.
    """

    async def scenario() -> None:
        pace = Pace(prefill_s=0.2, step_s=0.05)
        async with paced(pace, max_num_seqs=64) as at:

            async def one(number: int, max_tokens: int) -> Seen:
                await asyncio.sleep(0.01 * number)  # not all of them at the same moment
                body = {**STREAM, "prompt": "x", "max_tokens": max_tokens}
                return await ask(port_of(at), PATH, body)

            sizes = [10] * 50 + [1] * 5
            seen = await asyncio.gather(*(one(n, size) for n, size in enumerate(sizes)))
            await over(at)
            series = await Series.of(at.http)
            ttft, tpot = "baton_time_to_first_token_seconds", "baton_time_per_output_token_seconds"
            assert series.count(ttft, stream="true") == series.count(ttft) == 55
            assert series.count(tpot) == 50
            assert series.count("baton_inter_token_latency_seconds") == 450
            theirs = mean(one.ttft_s for one in seen)
            assert 0.2 <= series.mean(ttft) <= max(0.25, theirs)
            theirs = mean(one.tpot_s for one in seen if len(one.content_at) > 1)
            assert series.mean(tpot) == pytest.approx(theirs, rel=0.05)
            assert theirs >= 0.049  # a timer may be early by its resolution

    run(scenario)


def test_b105_ttft_has_the_time_in_the_queue() -> None:
    """B105: 50 at once where 2 fit; the router's quantiles are the client's."""

    async def scenario() -> None:
        pace = Pace(prefill_s=0.01, pull_s=0.005, step_s=0.005)
        async with paced(pace, max_num_seqs=2) as at:
            body = {**STREAM, "prompt": "x", "max_tokens": 4}
            seen = await asyncio.gather(*(ask(port_of(at), PATH, body) for _ in range(50)))
            await over(at)
            series = await Series.of(at.http)
            name = "baton_time_to_first_token_seconds"
            borders = series.borders(name)
            assert borders[-2] >= 120
            ttft = [one.ttft_s for one in seen]
            assert max(ttft) > 10 * 0.01, "nobody has waited"
            for share in QUANTILES:
                theirs = series.bucket_of(name, share, stream="true")
                assert abs(bucket_of(quantile(ttft, share), borders) - theirs) <= 1, share
            parts = sum(
                series.value("baton_stage_duration_seconds_sum", stage=stage)
                for stage in FIRST_STAGES
            )
            assert parts == pytest.approx(series[f"{name}_sum"])
            waited = series.value("baton_stage_duration_seconds_sum", stage="queue")
            assert waited > 0.5 * parts

    run(scenario)


# --- other workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "roles", "retry", "failovers"),
    [
        ("lose-prefill", "PPD", ("prefill", "internal"), {}),
        ("lose-pull", "PPD", ("prefill", "pull"), {}),
        ("lose-decode", "PDD", ("decode", "internal"), {}),
        ("lose-pull", "PD", ("prefill", "pull"), {"recompute": 1}),
    ],
)
def test_retries_are_counted_once_and_by_cause(
    fate: str, roles: str, retry: tuple[str, str], failovers: dict[str, int]
) -> None:
    async def scenario() -> None:
        async with paced(Pace(), roles=roles) as at:
            ended: list[Observation] = []
            at.front.requests.on_finished.append(ended.append)
            seen = await ask(port_of(at), PATH, {**STREAM, "prompt": f"{fate} x"})
            assert (seen.code, len(seen.content_at)) == (200, 5)
            await over(at)
            series = await Series.of(at.http)
            stage, reason = retry
            assert series.value("baton_retries_total", stage=stage, reason=reason) == 1
            assert series["baton_retries_total"] == 1
            assert series.by("baton_failovers_total", "kind") == failovers
            assert series.by("baton_requests_total", "code") == {"200": 1}
            decisions = series.by("baton_route_decisions_total", "decision")
            assert decisions == {"disagg": 1, "retry": 1}
            (one,) = ended
            assert one.retries == 1
            attempts = one.choices[0].attempts
            assert attempts[0].failure
            assert not attempts[1].failure
            assert one.next_stages is None
            assert series.count("baton_stage_duration_seconds", stage="kv_transfer") == 0
            assert series.count("baton_stage_duration_seconds", stage="queue") == 1

    run(scenario)


def test_a_ticket_that_is_used_again() -> None:
    async def scenario() -> None:
        async with deployed(roles="PDD") as at:
            failed: list[str] = []

            def fail(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Decode) and not failed:
                    failed.append("once")
                    link.send(wire.Failed(message.request, message.attempt, "internal", "x"))
                    return True
                return False

            for worker in at.workers[1:]:
                worker.hook = fail
            ended: list[Observation] = []
            at.front.requests.on_finished.append(ended.append)
            assert (await at.post(PATH, BODY)).status_code == 200
            await over(at)
            series = await Series.of(at.http)
            assert series.by("baton_failovers_total", "kind") == {"ticket reused": 1}
            assert series.by("baton_retries_total", "stage") == {"decode": 1}
            assert series.by("baton_route_decisions_total", "decision") == {"disagg": 1}
            (one,) = ended
            assert one.retries == 1
            assert one.choices[0].attempts[0].replaced
            assert one.next_stages is None

    run(scenario)


# --- who listens ----------------------------------------------------------------------------------


def test_listeners_hear_of_each_request_once_and_cannot_disturb() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            ended: list[Observation] = []

            def broken(seen: Observation) -> None:
                raise RuntimeError("a listener of no use")

            at.front.requests.on_finished += [broken, ended.append]
            headers = {"x-request-id": "mine-1"}
            assert (await at.post(PATH, BODY, headers=headers)).status_code == 200
            assert (await at.post(PATH, {})).status_code == 400
            await over(at)
            answered, refused = ended
            assert (answered.request_id, answered.model, answered.code) == ("mine-1", MODEL, 200)
            assert (answered.endpoint, answered.stream, answered.tokens) == (
                "completions", False, 5,
            )  # fmt: skip
            (attempt,) = answered.choices[0].attempts
            assert (attempt.prefill, attempt.decode) == ("P0", "D0")
            moments = [
                attempt.began_at, attempt.reserved_at, attempt.sent_at, attempt.first_at,
                attempt.handed_at, attempt.pulled_at, attempt.next_at, answered.ended_at,
            ]  # fmt: skip
            assert None not in moments
            assert moments == sorted(moments)  # type: ignore[type-var]
            assert (refused.code, refused.request_id, refused.choices) == (400, "", ())
            assert "prompt" in refused.error

    run(scenario)


def test_requests_that_go_on_can_be_looked_at() -> None:
    async def scenario() -> None:
        pace = Pace()
        async with paced(pace) as at:
            leaves = asyncio.Event()
            body = {**STREAM, "prompt": "stuck x"}
            going = asyncio.ensure_future(ask(port_of(at), PATH, body, leave_when=leaves.wait))
            await pace.reached("stuck x").wait()
            (seen,) = at.front.requests.seen()
            assert (seen.code, seen.ended_at, seen.ttft_s) == (0, None, None)
            assert seen.choices[0].attempts[0].prefill == "P0"
            leaves.set()
            left: Seen = await going
            assert left.left
            await over(at)
            assert at.front.requests.seen() == []

    run(scenario)


# --- workers that go ------------------------------------------------------------------------------


def test_a_worker_that_leaves_is_no_loss_and_one_that_falls_silent_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(connection, "DEAD_AFTER_S", 0.4)

    async def scenario() -> None:
        async with deployed(roles="PDD") as at:
            leaving, silent = at.workers[1:]
            leaving.report(state="draining")
            async with asyncio.timeout(5):
                while (await states(at)).get("draining") != 1:
                    await asyncio.sleep(0.01)
            leaving.registered = False
            leaving.report(state="left")
            await asyncio.sleep(0)
            leaving.die()
            silent.freeze()
            async with asyncio.timeout(10):
                while (await states(at)).get("dead", 0) < 2:
                    await asyncio.sleep(0.01)
            series = await Series.of(at.http)
            assert series.by("baton_worker_losses_total", "role") == {"decode": 1}
            assert series.by("baton_worker_losses_total", "reason") == {"silent": 1}
            kind = {"role": "decode", "kind": "actual"}
            async with asyncio.timeout(5):  # as discovery says, twice a second
                while (await Series.of(at.http)).value("baton_autoscale_replicas", **kind) != 1:
                    await asyncio.sleep(0.01)

    async def states(at: Deployment) -> dict[str, float]:
        return (await Series.of(at.http)).by("baton_workers", "state")

    run(scenario)


def test_a_worker_that_hangs_is_stalled_and_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(worker_module, "STALLED_AFTER_S", 0.3)

    async def scenario() -> None:
        async with deployed() as at:
            assert at.d.server is not None
            at.d.server.progress = lambda: (7, True)  # it has work, and makes no step
            async with asyncio.timeout(10):
                while not (await Series.of(at.http)).value("baton_workers", state="stalled"):
                    await asyncio.sleep(0.01)
            series = await Series.of(at.http)
            losses = series.by("baton_worker_losses_total", "reason", role="decode")
            assert losses == {"stalled": 1}

    run(scenario)
