"""What a run has shown: the verdict, the table of faults, and evidence (pure)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos import exchange
from tests.chaos.fleet import Member, Sample
from tests.chaos.inject import Injected
from tests.chaos.record import RIGHT, TIE, WRONG, Record
from tests.chaos.schedule import KINDS, Fault

AFTER_S = 2.0  # a request that starts so long after a fault was under way during it
NOISE = ("drop", "delay", "duplicate", "corrupt", "reorder")  # of transfers and messages
NUM_EXAMPLES = 8
OUTCOMES = (
    RIGHT, TIE, exchange.FAILED, exchange.RESET, exchange.CUT, WRONG, exchange.HANG,
    exchange.BROKEN,
)  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """What a run must reach, as far as it depends on its length."""

    answers: int
    right_share: float  # of the requests all through whose life a healthy pair lived
    each_kind: int
    noise: bool  # faults of transfers and messages as well


@dataclass
class Run:
    """All that was observed."""

    records: Sequence[Record]
    injected: Sequence[Injected]
    late: Sequence[Fault]
    members: Sequence[Member]
    samples: Sequence[Sample]
    counters: Counter[str]
    left: Sequence[str]  # what was not idle, not whole or not right in the end
    forgiven: bool = False  # over UCX/TCP the library aborts resumed producers
    drains: bool = True
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    ok: bool
    what: str


def verdict(run: Run, goal: Goal) -> list[Check]:
    """Each thing that must hold."""
    outcomes = Counter(record.outcome for record in run.records)
    answers = outcomes[RIGHT] + outcomes[TIE]
    healthy = [r for r in run.records if r.outcome != exchange.CUT and in_health(r, run.samples)]
    counted = [r for r in healthy if not died_with_router(r, run)]
    share = right_share(counted)
    resets = [
        r for r in run.records if r.outcome == exchange.RESET and not died_with_router(r, run)
    ]
    ended = [m for m in run.members if not m.alive and not m.end_expected and not _abort(m, run)]
    checks = [
        Check(answers >= goal.answers, f"{answers} answers, at least {goal.answers}"),
        Check(
            share >= goal.right_share,
            f"{share:.1%} of {len(counted)} requests right while a healthy pair lived, at least"
            f" {goal.right_share:.0%} ({right_share(healthy):.1%} with those of killed routers)",
        ),
        Check(not outcomes[WRONG], f"{outcomes[WRONG]} wrong texts"),
        Check(not outcomes[exchange.HANG], f"{outcomes[exchange.HANG]} hangs past the deadline"),
        Check(not resets, f"{len(resets)} connections cut that no dead router explains"),
        Check(
            not outcomes[exchange.BROKEN],
            f"{outcomes[exchange.BROKEN]} answers without one terminal event",
        ),
        Check(not ended, f"{len(ended)} processes ended that were not killed"),
        Check(not run.left, f"{len(run.left)} things left or missing when idle"),
    ]
    counts = fault_counts(run)
    few = {name: n for name, n in counts.items() if n < goal.each_kind}
    if not goal.noise:
        few = {name: n for name, n in few.items() if name in {kind.name for kind in KINDS}}
    detail = ": " + ", ".join(f"{name} {n}" for name, n in few.items()) if few else ""
    what = f"each kind of fault at least {goal.each_kind} times{detail}"
    return [*checks, Check(not few, what)]


def fault_counts(run: Run) -> dict[str, int]:
    """How often each kind of fault was injected, those that never were included."""
    counts = {kind.name: 0 for kind in KINDS}
    for done in run.injected:
        counts[done.fault.kind.name] += 1
    counts["client cut"] = sum(record.outcome == exchange.CUT for record in run.records)
    counts["expired lease"] = run.counters["expired_leases"]
    for what in ("transfer", "message"):
        counts |= {f"{what} {kind}": run.counters[f"{what} {kind}"] for kind in NOISE}
    return counts


def examples(run: Run) -> list[Record]:
    """Some of the requests that broke a promise, then some of those that failed in health."""
    bad = [r for r in run.records if r.outcome in (WRONG, exchange.HANG, exchange.BROKEN)]
    rest = [r for r in run.records if not died_with_router(r, run)]
    bad += [r for r in rest if r.outcome == exchange.RESET]
    failed = [r for r in rest if r.outcome == exchange.FAILED and in_health(r, run.samples)]
    return (bad or failed)[:NUM_EXAMPLES]


def right_share(records: Sequence[Record]) -> float:
    """Right answers among the requests."""
    return sum(r.outcome in (RIGHT, TIE) for r in records) / max(1, len(records))


def in_health(record: Record, samples: Sequence[Sample]) -> bool:
    """Whether a healthy pair was there all through a request's life."""
    before = [s for s in samples if s.at_s <= record.start_s][-1:]
    during = [s for s in samples if record.start_s < s.at_s <= record.end_s]
    after = [s for s in samples if s.at_s > record.end_s][:1]
    return all(sample.healthy for sample in (*before, *during, *after))


def died_with_router(record: Record, run: Run) -> bool:
    """Whether a router was killed during a request, and what the client got is not of a router's
    making: a reset, or an error of the ingress.
    """
    torn = record.outcome == exchange.RESET or (
        record.outcome == exchange.FAILED and not record.reply.router
    )
    return torn and any(
        done.fault.kind.name == "kill router"
        and record.start_s - AFTER_S <= done.at_s <= record.end_s
        for done in run.injected
    )


def _abort(member: Member, run: Run) -> bool:
    return run.forgiven and member.role == "prefill" and member.resumed


# --- text ----------------------------------------------------------------------------------------


def lines(run: Run, goal: Goal) -> Iterator[str]:
    """The whole report."""
    yield from _table(run)
    yield ""
    yield "counters of all processes: " + ", ".join(
        f"{name} {number}" for name, number in sorted(run.counters.items()) if number
    )
    yield from (f"{name}: {text}" for name, text in run.extra.items())
    yield from _errors(run)
    yield from _evidence(run)
    yield ""
    for check in verdict(run, goal):
        yield f"{'ok  ' if check.ok else 'FAIL'}  {check.what}"


def _table(run: Run) -> Iterator[str]:
    """Per kind of fault: how often, what became of the requests under way, when all was well."""
    yield (
        f"{'fault':<22}{'count':>6}   requests under way: "
        + "".join(f"{name:>8}" for name in OUTCOMES)
        + "   whole again after s (median, most)"
    )
    by_kind: dict[str, list[Injected]] = {kind.name: [] for kind in KINDS}
    for done in run.injected:
        by_kind[done.fault.kind.name].append(done)
    for name, faults in by_kind.items():
        counts: Counter[str] = Counter()
        for done in faults:
            counts.update(r.outcome for r in run.records if _during(r, done))
        times = sorted(time for f in faults if (time := _whole_after(f, run.samples)) is not None)
        recovery = f"{times[len(times) // 2]:8.1f}{times[-1]:8.1f}" if times else ""
        yield f"{name:<22}{len(faults):>6}{'':23}" + _outcomes(counts) + "   " + recovery
    others = {n: c for n, c in fault_counts(run).items() if n not in by_kind}
    yield ", ".join(f"{name} {count}" for name, count in others.items())
    yield f"{'all requests':<22}{len(run.records):>6}{'':23}" + _outcomes(
        Counter(record.outcome for record in run.records)
    )
    if run.late:
        yield "not injected: " + ", ".join(fault.kind.name for fault in run.late)


def _outcomes(counts: Mapping[str, int]) -> str:
    return "".join(f"{counts.get(name, 0):>8}" for name in OUTCOMES)


def _during(record: Record, done: Injected) -> bool:
    return record.start_s <= done.end_s + AFTER_S and record.end_s >= done.at_s


def _whole_after(done: Injected, samples: Sequence[Sample]) -> float | None:
    """Seconds from the fault's end until every router had all pairs, later faults included."""
    later = (s.at_s for s in samples if s.at_s > done.end_s + 0.5 and s.whole)
    first = next(later, None)
    return None if first is None else first - done.end_s


def _errors(run: Run) -> Iterator[str]:
    """Error answers by cause; with and without a healthy pair."""
    causes: dict[tuple[int, str, bool], list[int]] = {}
    for r in run.records:
        if r.outcome == exchange.FAILED:
            cause = (r.reply.status, r.reply.note[:150], in_health(r, run.samples))
            causes.setdefault(cause, []).append(r.number)
    for (status, note, healthy), numbers in sorted(causes.items(), key=lambda c: -len(c[1])):
        some = ", ".join(map(str, numbers[:5]))
        pair = "a healthy pair" if healthy else "no healthy pair"
        yield f"error {status} x {len(numbers)}, {pair}: {note} (requests {some})"


def _evidence(run: Run) -> Iterator[str]:
    """What a failing run is acted upon."""
    for r in examples(run):
        yield (
            f"{r.outcome}: request {r.number} (question {r.question}, stream {r.stream}) from"
            f" {r.start_s:.1f} to {r.end_s:.1f} s, status {r.reply.status}: {r.reply.note}"
        )
    for member in run.members:
        if not member.alive and not member.end_expected:
            yield (
                f"ended: {member.role} {member.pid}, born at {member.born_s:.1f} s, gone at"
                f" {member.ended_s:.1f} s{', after a long stop' if member.resumed else ''}"
            )
    yield from run.left
