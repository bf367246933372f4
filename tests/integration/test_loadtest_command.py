"""``baton loadtest`` as a user types it, against servers that answer, die and refuse."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.record import INTERRUPTED, Record
from loadtest.store import read_records, read_run
from services import cli
from tests.support.serving import free_port
from tests.support.stub_server import RunningStub, running_stub

LIMIT_S = 60
FAST = {"ttft_ms": 5, "itl_ms": 2}


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    with running_stub(**FAST) as server:
        yield server


def baton(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "loadtest", *words]
    return subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, timeout=LIMIT_S
    )


def summary_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return values


def test_a_run_leaves_its_requests_its_figures_and_a_report(
    stub: RunningStub, tmp_path: Path
) -> None:
    done = baton(
        *("--url", stub.url, "--requests", "12", "--rate", "40", "--input", "32", "--output", "6"),
        *("--slo", "ttft=2s,tpot=1s"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "100 %" in done.stdout
    assert "12 requests" in done.stdout
    records = read_records(tmp_path / "requests.jsonl")
    assert len(records) == 12
    assert all(r.output_tokens == 6 and r.prompt_tokens == 32 for r in records)
    total = summary_of(tmp_path)["figures"]["total"]
    assert total["num_ok"] == 12
    assert (total["attainment"]["met"], total["attainment"]["total"]) == (12, 12)
    assert total["goodput"] == pytest.approx(total["request_throughput"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 5
    assert stub.url in page
    assert "ttft=2s,tpot=1s" in page


def test_what_is_sent_is_what_was_asked_for(stub: RunningStub, tmp_path: Path) -> None:
    stub.forget()
    done = baton(
        *("--url", stub.url, "--endpoint", "completions", "--prompts", "ids:1000"),
        *("--concurrency", "3", "--requests", "9", "--input", "20", "--prefix", "8"),
        *("--output", "choice:2,4", "--seed", "7", "--warmup", "0"),
        *("--extra-body", '{"user": "load"}', "--no-ignore-eos"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    seen = stub.requests()
    assert len(seen) == 9
    assert {len(request.prompt) for request in seen} == {28}
    assert len({tuple(request.prompt[:8]) for request in seen}) == 1
    assert len({tuple(request.prompt[8:]) for request in seen}) == 9
    assert {record.output_tokens for record in read_records(tmp_path / "requests.jsonl")} == {2, 4}


def test_a_trace_is_replayed_at_its_speed(stub: RunningStub, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * n, "input_length": 600, "output_length": 2, "hash_ids": [0, n + 1]}
        for n in range(8)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = baton(
        *("--url", stub.url, "--trace", str(trace), "--speed", "10", "--length-scale", "0.05"),
        folder=tmp_path / "out",
    )
    assert done.returncode == 0, done.stderr
    assert "8 requests" in done.stdout
    assert "sharing" in done.stdout
    records = read_records(tmp_path / "out" / "requests.jsonl")
    assert [record.due_s for record in records] == pytest.approx([0.05 * n for n in range(8)])


def test_ctrl_c_keeps_and_reports_what_there_is(tmp_path: Path) -> None:
    with running_stub(ttft_ms=5, itl_ms=2) as server:
        command = [sys.executable, "-m", "services.cli", "loadtest", "--url", server.url]
        command += ["--rate", "50", "--duration", "600", "--output", "4", "--out", str(tmp_path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            for line in process.stderr:  # the first line of progress
                if "done" in line:
                    break
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "interrupted" in out.lower()
    stored = read_run(tmp_path)
    assert stored.result.interrupted
    assert 0 < len(stored.result.records) < stored.result.num_planned
    ended = [record for record in stored.result.records if not record.error]
    assert ended
    assert {record.error for record in stored.result.records} <= {"", INTERRUPTED}
    assert summary_of(tmp_path)["figures"]["total"]["num_ok"] == len(ended)
    assert (tmp_path / "report.html").exists()


def errors_of(records: tuple[Record, ...]) -> set[str]:
    return {record.error for record in records}


def test_a_server_that_dies_is_an_error_of_each_request(tmp_path: Path) -> None:
    with running_stub(**FAST) as server:
        command = [sys.executable, "-m", "services.cli", "loadtest", "--url", server.url]
        command += ["--rate", "20", "--duration", "8", "--output", "4", "--out", str(tmp_path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "done" in line:
                    break
            os.kill(server.pid, signal.SIGKILL)
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    records = read_records(tmp_path / "requests.jsonl")
    assert len(records) == summary_of(tmp_path)["run"]["num_planned"]
    assert "" in errors_of(records)
    assert "connect" in errors_of(records)
    assert "connect" in out


def test_a_server_that_refuses_all_is_said_and_the_status_tells(tmp_path: Path) -> None:
    with running_stub(status=429) as server:
        done = baton("--url", server.url, "--requests", "5", "--rate", "50", folder=tmp_path)
    assert done.returncode == 1
    assert "http 429" in done.stdout
    assert errors_of(read_records(tmp_path / "requests.jsonl")) == {"http 429"}


def test_a_report_by_other_objectives(stub: RunningStub, tmp_path: Path) -> None:
    done = baton(
        *("--url", stub.url, "--requests", "5", "--rate", "50", "--output", "4"),
        *("--slo", "ttft=60s"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "services.cli", "loadtest", "report", str(tmp_path)]
    again = subprocess.run(
        [*command, "--slo", "ttft=0.001ms"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert again.returncode == 0, again.stderr
    assert "Goodput 0 requests/s: 0.0 %" in again.stdout


def test_the_highest_rate_is_searched(tmp_path: Path) -> None:
    """A server that answers at once holds every rate that is tried."""
    with running_stub(**FAST) as server:
        done = baton(
            *("--url", server.url, "--find-max-rate", "--rate", "20", "--duration", "0.5"),
            *("--output", "2", "--max-probes", "2", "--slo", "ttft=10s"),
            folder=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert "the highest rate tried" in done.stdout
    report = json.loads((tmp_path / "comparison.json").read_text())
    (entry,) = report["sections"][0]["max_rates"]
    assert entry["rate"]["value"] == pytest.approx(40, rel=0.2)
    assert entry["rate"]["high"] is None


def test_two_servers_by_turns(tmp_path: Path) -> None:
    with running_stub(**FAST) as fast, running_stub(ttft_ms=50, itl_ms=20) as slow:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "services.cli", "loadtest", "compare"),
                *(f"fast={fast.url}", f"slow={slow.url}", "--rates", "10,20", "--rounds", "2"),
                *("--duration", "0.6", "--output", "5", "--slo", "tpot=10ms,ttft=5s"),
                *("--out", str(tmp_path)),
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "comparison.json").read_text())
    (section,) = report["sections"]
    assert {(cell["target"], cell["rate"]) for cell in section["cells"]} == {
        (name, rate) for name in ("fast", "slow") for rate in (10, 20)
    }
    slower = {
        ratio["figure"]: ratio["ratio"]["value"]
        for ratio in section["ratios"]
        if ratio["figure"].startswith("TPOT p50")
    }
    assert slower
    assert all(value > 3 for value in slower.values())
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    targets = [json.loads(line)["target"] for line in lines]
    assert targets.count("fast") == targets.count("slow") > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "0"], ["rate 0", "above 0"]),
        (["--rate", "fast"], ["--rate", "fast"]),
        (["--slo", "ttft=1parsec"], ["ttft=1parsec", "500ms"]),
        (["--slo", "chat:ttft=1s"], ["no class 'chat'", "requests"]),
        (["--input", "uniform:9"], ["uniform:9"]),
        (["--arrivals", "gamma"], ["arrivals", "gamma"]),
        (["--scenario", "chatt"], ["chatt", "multi-turn"]),
        (["--trace", "/nonexistent.jsonl"], ["/nonexistent.jsonl"]),
        (["--scenario", "chat", "--trace", "sample:mooncake"], ["either", "trace"]),
        (["--endpoint", "chats"], ["chats", "completions"]),
        (["--prompts", "idz"], ["idz", "tokenizer.json"]),
        (["--url", "localhost:8000"], ["localhost:8000", "http://"]),
        (["--extra-body", "{"], ["extra-body", "JSON"]),
        (["--find-max-rate"], ["--slo"]),
        (["--rate", "inf"], ["infinite", "number of requests"]),
        (["--rate", "1e7", "--duration", "100"], ["1,000,000,000 requests", "200,000"]),
        (["--requests", "5", "--duration", "5"], ["either", "duration"]),
        (["--speed", "2"], ["speed", "trace"]),
        (["--trace", "sample:mooncake", "--speed", "0"], ["speed 0", "above 0"]),
        (["--find-max-rate", "--slo", "ttft=1s", "--attainment", "90"], ["attainment 90"]),
        (["--api-key-file", "/nonexistent"], ["/nonexistent"]),
        (["compare", "http://127.0.0.1:1"], ["two targets"]),
        (["compare", "a=--port 1", "b=http://x"], ["--port"]),
        (["compare", "a=http://x", "b=http://y", "--rates", "1,x", "--slo", "ttft=1s"], ["1,x"]),
        (["compare", "a=http://x", "b=http://y"], ["--slo"]),
        (["report", "/nonexistent"], ["/nonexistent"]),
    ],
)
def test_wrong_use_is_one_line_and_asks_no_server(
    words: list[str],
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["loadtest", *words])
    assert end.value.code == 2
    _, err = capsys.readouterr()
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1
    for word in said:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_one_line(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = baton("--url", url, folder=tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("baton: error: ")
    assert url in done.stderr
    assert "Traceback" not in done.stderr


def test_results_are_not_overwritten(stub: RunningStub, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("")
    done = baton("--url", stub.url, folder=tmp_path)
    assert done.returncode == 2
    assert "another folder" in done.stderr
