"""Twenty times down and up, with streams running all the time. In full only."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.reference import Judge
from tests.support.scaling import Beat, Scaled, Stream, Watch, config, prompt, scaled
from tests.support.serving import until


@pytest.mark.timeout(1800)
def test_twenty_times_down_and_up_with_streams_running(
    small_model: Path, small_judge: Judge, full: bool, tmp_path: Path
) -> None:
    """Bursts of prompts and of answers bring workers, which leave after them, in the middle of
    streams: these begin when all workers are there, and half of them run on those that leave.
    """
    if not full:
        pytest.skip("only in the full form")
    # What is missed while workers start must not count as that one worker is not enough.
    settings = config(small_model, prefill=(1, 1, 2), decode=(1, 1, 2), attainment=0.5)
    with scaled(settings, tmp_path) as found, Watch(found) as watch:
        for cycle in range(20):
            name = f"cycle {cycle}"
            with Beat(4, partial(found.ask, num_tokens=24, salt=name, of=10)) as beat:
                until(lambda: grown(found), f"both pools have grown in {name}", 120)
                long = [Stream(found.server, prompt(n, 40), 600, f"{name} {n}") for n in range(4)]
                for stream in long:
                    stream.begun()
            found.settle(1, 1)
            for n, ids in enumerate(beat.results):
                small_judge.check(prompt(n % 10), ids)
            for stream in long:
                stream.check(small_judge)
            print(f"{name}: {len(beat.results)} answers, 4 streams")
        requests = found.state()["requests"]
    for role in ("prefill", "decode"):
        sizes = watch.sizes(role)
        assert sizes == [1, *([2, 1] * 20)], (role, sizes)
    _, early = watch.early_birds()
    assert early == []
    assert requests["failed"] == 0
    assert len(watch.drained("decode")) >= 10, "too few left with streams running"
    print(f"{requests}; drained while at work: {len(watch.drained('decode'))}")


def grown(found: Scaled) -> bool:
    return [len(found.ready(role)) for role in ("prefill", "decode")] == [2, 2]
