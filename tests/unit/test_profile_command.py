"""``baton profile``: wrong use is found before anything is loaded; what it says is the profile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services import cli
from services.config import AppConfig
from services.planner import command, words
from services.planner.fit import Point, fit
from services.planner.halves import with_zeros
from services.planner.observation import Seats
from services.planner.profile import Profile
from services.planner.words import Objectives

PROFILE = Profile(0.02, 0.003, 4e-7, 0.022, 0.0016, 3.9e-6)
OBJECTIVES = Objectives(ttft_s=4.0, tpot_s=0.1, attainment=0.95)
SEATS = Seats(32, 32_768)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--minutes", "0"], ["--minutes: 0", "0.05"]),
        (["--minutes", "nan"], ["--minutes: nan"]),
        (["--minutes", "soon"], ["--minutes", "soon"]),
        (["--role", "router"], ["--role: 'router'", "prefill, decode, mixed"]),
        (["--role", "mixed"], ["no mixed worker", "prefill, decode"]),
        (["--mixed", "1", "--prefill", "0", "--decode", "0", "--role", "decode"], ["no decode"]),
        (["--out", "/"], ["--out /", "is a folder"]),
        (["--out", "/no/such/folder/x.json"], ["--out", "no folder /no/such/folder"]),
        (["--threads", "many"], ["--threads: 'many'"]),
        (["--model", "no-such-model"], ["no-such-model", "smollm2-135m-instruct"]),
        (["--minute", "1"], ["--minute"]),
    ],
)
def test_wrong_use(argv: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["profile", *argv])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1
    for word in said:
        assert word in err


def test_help_has_its_own_flags_and_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", "--help"])
    out = capsys.readouterr().out
    for flag in ("--minutes", "--out", "--role", "--threads", "--model", "--config", "--prefill"):
        assert flag in out


def test_flags_reach_the_configuration_and_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[AppConfig, command.ProfileOptions]] = []

    def run(config: AppConfig, options: command.ProfileOptions) -> int:
        seen.append((config, options))
        return 7

    monkeypatch.setattr(cli, "run_profile", run)
    argv = ["profile", "--minutes", "0.5", "--role", "decode", "--threads", "1", "--decode", "1..3"]
    assert cli.main(argv) == 7
    ((config, options),) = seen
    assert options == command.ProfileOptions(0.5, "", "decode")
    assert config.decode.engine.threads == 1
    assert config.autoscaling.decode.max == 3


# --- words ---


def decode_fit() -> words.Fit:
    points = [
        Point(batch, context, PROFILE.decode_s(batch, context) * (1.1 if batch == 8 else 1.0))
        for batch in (1, 8, 32)
        for context in (64, 512)
    ]
    return fit("decode", points)


def test_each_point_has_its_line_and_the_largest_error_its_name() -> None:
    found = decode_fit()
    text = words.fit_text(found)
    lines = text.splitlines()
    assert len(lines) == 1 + len(found.points) + 3
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["decode", "sequences", "context", "measured", "model", "error"]
    first = re.split(r"\s{2,}", lines[1].strip())
    assert first[:2] == ["1", "64"]
    assert first[2] == words.duration(PROFILE.decode_s(1, 64))
    assert re.fullmatch(r"[+-]\d+ %", first[4])
    worst = found.worst
    assert f"({worst.size} sequence" in lines[-3]
    assert f"at a context of {worst.context:.0f})" in lines[-3]
    assert f"{100 * found.largest_error:.0f} % at most" in lines[-3]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (3.2e-6, "3.2 µs"), (0.0032, "3.2 ms"), (0.0234, "23.4 ms"), (12.0, "12 s"),
        (4e-7, "400 ns"), (0.1234, "123 ms"), (1.0, "1 s"), (0.99999, "1 s"), (123.4, "123 s"),
    ],
)  # fmt: skip
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


def test_a_prefill_worker_has_time_for_less_than_all_of_its_time() -> None:
    """By the planner's own queue: with patience nearly all, with little time to wait much less."""
    takes = PROFILE.prefill_s(512)
    patient = Objectives(20 * takes, 0.1, 0.95)
    rates = [
        words.prompts_per_s(PROFILE, Objectives(many * takes, 0.1, 0.95)) * takes
        for many in (1.01, 1.5, 2, 4, 20)
    ]
    assert rates == sorted(rates)
    assert 0 < rates[0] < 0.1
    assert 0.6 < words.prompts_per_s(PROFILE, patient) * takes < 1.0
    assert words.prompts_per_s(PROFILE, Objectives(0.9 * takes, 0.1, 0.95)) == 0.0
    assert "no prompt of 512 tokens" in words.prefill_capacity(PROFILE, Objectives(0.1, 0.1, 0.95))
    assert "prompts/s of 512 tokens" in words.prefill_capacity(PROFILE, patient)


def test_a_decode_worker_is_bound_by_time_by_seats_or_by_memory() -> None:
    batch, bound = words.answers_at_once(PROFILE, OBJECTIVES, Seats(1000, 10**9))
    assert bound == "TPOT"
    assert PROFILE.decode_s(batch, 512) <= OBJECTIVES.tpot_s
    assert PROFILE.decode_s(1.3 * batch, 512) > OBJECTIVES.tpot_s
    assert words.answers_at_once(PROFILE, Objectives(4, 10.0, 0.95), SEATS)[1] == "seats"
    assert words.answers_at_once(PROFILE, Objectives(4, 10.0, 0.95), Seats(32, 2000))[1] == "KV"
    assert words.answers_at_once(PROFILE, Objectives(4, 0.01, 0.95), SEATS) == (0.0, "TPOT")
    text = words.decode_capacity(PROFILE, Objectives(4, 0.01, 0.95), SEATS)
    assert text.startswith("no answer behind 512 tokens")


def test_the_words_are_those_of_the_model() -> None:
    found = decode_fit()
    text = words.model_text(found)
    assert words.duration(found.half["decode_step"]) in text
    assert words.duration(with_zeros(found.half).decode_s(8, 512)) in text


def test_a_file_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    ok = command.ProfileOptions(out=str(tmp_path / "x.json"))
    assert command._check(AppConfig(), ok) == tmp_path / "x.json"
    assert not (tmp_path / "x.json").exists()
