"""``make scaling-run``: pools that scale by themselves, on this machine, seen from outside.

A real ``baton serve`` with one to three workers of each kind. The load shifts from long prompts to
long answers and back; each second it is noted what the deployment wants, what is there, and what
clients see. Workers of one machine share its cores, and would be no faster together: so each step
takes as long as a declared ``pace`` says, and tokens are the model's own. Status 1 when a request
fails, when answers to the same prompt differ, when the pools do not go opposite ways, or when one
turns twice within a cool-down.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.error
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.serving import Served, served

TTFT_S, TPOT_S = 6.0, 0.2  # objectives
DOWN_AFTER_S, COOLDOWN_S = 30.0, 20.0
PROMPTS = 6  # different ones of each kind
MOST_AT_ONCE = 96
LOOK_S = 1.0  # between two looks; a change is seen up to so much later than it was
ROLES = ("prefill", "decode")
WORDS = ("river", "stone", "amber", "quiet", "north", "window", "paper", "engine", "garden")

CONFIG = {
    "model": "smollm2-135m-instruct",
    "router": {"slo_ttft_s": TTFT_S, "slo_tpot_s": TPOT_S},
    "threads": 1,
    "token_budget": 128,
    "kv_blocks": 512,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "drain_s": 60,
    # Slow enough for two cores to compute what five workers do at once.
    "prefill": {"pace": "prompt_token=0.006"},
    "decode": {"pace": "step=0.05,seq=0.02"},
    "autoscaling": {
        "budget": 5,
        "interval_s": 1,
        "prefill": {"min": 1, "max": 3, "up_cooldown_s": 5},
        "decode": {"min": 1, "max": 3, "up_cooldown_s": 5},
    },
}
for _role in ROLES:
    CONFIG["autoscaling"][_role] |= {"down_after_s": DOWN_AFTER_S, "cooldown_s": COOLDOWN_S}  # type: ignore[index]


@dataclass(frozen=True)
class Phase:
    """A kind of load. ``prompt``: words, about as many tokens."""

    name: str
    rate: float  # requests per second
    prompt: int
    answer: int  # tokens


PROMPT_HEAVY = Phase("long prompts", 0.75, 300, 4)
ANSWER_HEAVY = Phase("long answers", 0.9, 16, 100)


@dataclass
class Answer:
    """One request, as its client saw it; seconds since the run began."""

    phase: str
    prompt: int
    sent_s: float
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass
class Run:
    """All that was seen."""

    phases: list[tuple[str, float]] = field(default_factory=list)  # name, when it began
    answers: list[Answer] = field(default_factory=list)
    pools: list[dict[str, Any]] = field(default_factory=list)  # a look each second

    def targets(self, role: str) -> list[tuple[float, int]]:
        """(when, target), each time it changed."""
        changes: list[tuple[float, int]] = []
        for look in self.pools:
            target = look[role]["target"]
            if not changes or changes[-1][1] != target:
                changes.append((look["at"], target))
        return changes


def ask(server: Served, answer: Answer, phase: Phase, text: str, began: float) -> None:
    """Send one request and fill in what comes."""
    body = {
        "prompt": text,
        "max_tokens": phase.answer,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": f"{phase.name} at {answer.sent_s}",  # nothing of it is in any cache
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    try:
        for chunk in server.stream("/v1/completions", body):
            if chunk.get("error"):
                answer.error = chunk["error"]["message"]
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
            if chunk.get("choices") and chunk["choices"][0]["text"]:
                answer.text += chunk["choices"][0]["text"]
                last = time.monotonic() - began
                first = first or last
    except urllib.error.HTTPError as error:
        with error:
            answer.error = f"{error.code} {error.read().decode(errors='replace')}"
    except (OSError, AssertionError) as error:
        answer.error = repr(error)
    answer.ttft_s = first - answer.sent_s
    answer.tpot_s = (last - first) / max(1, answer.tokens - 1)
    if not answer.error and answer.tokens != phase.answer:
        answer.error = f"{answer.tokens} tokens instead of {phase.answer}"


def prompts(phase: Phase) -> list[str]:
    """A few texts, so that the same is answered by different workers, and must be equally."""
    draw = random.Random(phase.name)
    return [" ".join(draw.choices(WORDS, k=phase.prompt)) for _ in range(PROMPTS)]


def look(server: Served, began: float) -> dict[str, Any]:
    """Both pools now."""
    _, state = server.get("/internal/state")
    return {
        "at": time.monotonic() - began,
        "queued": state["requests"]["queued"],
        **{
            role: {
                "target": state["pools"][role]["target"],
                "ready": sum(w["role"] == role and w["state"] == "ready" for w in state["workers"]),
                "reason": state["pools"][role].get("reason", ""),
                "words": state["pools"][role].get("words", ""),
            }
            for role in ROLES
        },
    }


def watch(server: Served, run: Run, began: float, over: threading.Event) -> None:
    """A look each second; changes are said."""
    known: dict[str, int] = {}
    while not over.wait(LOOK_S):
        try:
            seen = look(server, began)
        except (OSError, KeyError, ValueError) as error:
            print(f"{time.monotonic() - began:6.0f} s  not seen: {error!r}", flush=True)
            continue
        run.pools.append(seen)
        for role in ROLES:
            if seen[role]["target"] != known.get(role):
                known[role] = seen[role]["target"]
                print(
                    f"{seen['at']:6.0f} s  {role}: {known[role]}, {seen[role]['words']}", flush=True
                )


def load(server: Served, run: Run, phases: list[tuple[Phase, float]], began: float) -> None:
    """Requests at random moments, whatever becomes of those before."""
    draw = random.Random(1)
    at = 0.0
    waits: list[Future[None]] = []
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        for phase, seconds in phases:
            texts, end = prompts(phase), at + seconds
            run.phases.append((phase.name, at))
            print(f"{at:6.0f} s  {phase.name}: {phase.rate:g}/s", flush=True)
            while (at := at + draw.expovariate(phase.rate)) < end:
                time.sleep(max(0.0, began + at - time.monotonic()))
                which = draw.randrange(PROMPTS)
                answer = Answer(phase.name, which, at)
                run.answers.append(answer)
                waits.append(pool.submit(ask, server, answer, phase, texts[which], began))
            at = end
        for wait in waits:
            wait.result()


# --- what must hold -------------------------------------------------------------------------------


def problems(run: Run) -> list[str]:
    """What is not as it must be."""
    found = [f"{a.phase}, sent at {a.sent_s:.1f} s: {a.error}" for a in run.answers if a.error]
    texts: dict[tuple[str, int], set[str]] = {}
    for answer in run.answers:
        if not answer.error:
            texts.setdefault((answer.phase, answer.prompt), set()).add(answer.text)
    found += [f"{len(s)} different answers to {key}" for key, s in texts.items() if len(s) > 1]
    for role in ROLES:
        found += [f"{role} turned twice within a cool-down: {t}" for t in early_turns(run, role)]
    return found + opposite(run)


def early_turns(run: Run, role: str) -> list[tuple[float, float]]:
    """Pairs of changes of direction that lie closer together than a cool-down."""
    changes = run.targets(role)
    steps = [
        (at, after - before) for (_, before), (at, after) in zip(changes, changes[1:], strict=False)
    ]
    turns = [at for (_, one), (at, two) in zip(steps, steps[1:], strict=False) if one * two < 0]
    return [(a, b) for a, b in zip(turns, turns[1:], strict=False) if b - a < COOLDOWN_S - LOOK_S]


def opposite(run: Run) -> list[str]:
    """Each shift must move both pools, and in opposite directions."""
    found = []
    sizes = [{role: peak(run, i, role) for role in ROLES} for i in range(len(run.phases))]
    for (name, _), before, after in zip(run.phases[1:], sizes, sizes[1:], strict=False):
        p, d = (after[role] - before[role] for role in ROLES)
        if p * d >= 0:
            found.append(f"with {name}, prefill went by {p:+d} and decode by {d:+d}")
    return found


def peak(run: Run, phase: int, role: str) -> int:
    """Workers that were there at the end of a phase."""
    ends = [at for _, at in run.phases[1:]] + [run.pools[-1]["at"]]
    return int([s for s in run.pools if s["at"] <= ends[phase]][-1][role]["ready"])


# --- all of it ------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--seconds", type=float, default=150, help="of each of the three phases")
    flags.add_argument("--out", type=Path, help="JSON of all that was seen")
    flags.add_argument("--plot", type=Path, help="SVG of it")
    return flags


def main() -> int:
    """The exit status."""
    args = parser().parse_args()
    phases = [(p, args.seconds) for p in (PROMPT_HEAVY, ANSWER_HEAVY, PROMPT_HEAVY)]
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "baton.yaml"
        file.write_text(yaml.safe_dump(CONFIG))
        with served("--config", str(file)) as server:
            began, over = time.monotonic(), threading.Event()
            watcher = threading.Thread(target=watch, args=(server, run, began, over))
            watcher.start()
            try:
                load(server, run, phases, began)
            finally:
                over.set()
                watcher.join()
    if args.out:
        args.out.write_text(json.dumps(asdict(run), indent=1) + "\n")
    if args.plot:
        from tests.support.scaling_plot import plot

        args.plot.write_text(plot(run, TTFT_S, TPOT_S))
    wrong = problems(run)
    report(run)
    print("\n".join(wrong) or "no request failed, and both pools went where the load was")
    return 1 if wrong else 0


def report(run: Run) -> None:
    """A table by phase."""
    print(
        f"\n{'phase':<14}{'requests':>9}{'TTFT met':>10}{'TPOT met':>10}{'prefill':>9}{'decode':>8}"
    )
    for i, (name, since) in enumerate(run.phases):
        until = run.phases[i + 1][1] if i + 1 < len(run.phases) else float("inf")
        here = [a for a in run.answers if since <= a.sent_s < until and not a.error]
        met = [sum(a.ttft_s <= TTFT_S for a in here), sum(a.tpot_s <= TPOT_S for a in here)]
        shares = [f"{100 * count / max(1, len(here)):.0f} %" for count in met]
        print(
            f"{name:<14}{len(here):>9}{shares[0]:>10}{shares[1]:>10}"
            f"{peak(run, i, 'prefill'):>9}{peak(run, i, 'decode'):>8}"
        )


if __name__ == "__main__":
    sys.exit(main())
