"""What the deployment wants of its pools, and what one router tells those who decide it (pure).

Who decides is elsewhere: a router is told what was decided and why, and how starting workers goes,
and tells in turn what was asked of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.dispatch import Dispatcher
    from router.ledger import Ledger

SCALED = ("prefill", "decode")  # roles of the pools that can scale
REASONS = (
    "load", "backlog", "trend", "attainment", "kv", "idle", "wake", "budget", "limits",
    "start_failures",
)  # fmt: skip
"""Why a target can change."""
START_REASONS = ("exception", "died")
MANY = 3  # starts that fail one after the other: more than bad luck


@dataclass(frozen=True)
class StartFailure:
    """A worker that could not start."""

    role: str
    worker: str  # its id, or what is known of it
    reason: str  # exception, or died: nothing more was heard of it while it started
    message: str
    at: float  # time of day, seconds since 1970
    in_a_row: int  # failures of this role since a worker of it has last started


@dataclass(frozen=True)
class Pools:
    """What the deployment wants of its pools, and how starting workers goes."""

    targets: Mapping[str, int] = field(default_factory=dict)  # by role, of pools that scale
    most: Mapping[str, int] = field(default_factory=dict)  # there may be, the same
    reasons: Mapping[str, str] = field(default_factory=dict)  # value of a label, by role
    words: Mapping[str, str] = field(default_factory=dict)  # the same as a sentence
    # Changes of a target since the deployment began, by (role, up or down, reason).
    decisions: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    failures: tuple[StartFailure, ...] = ()  # the latest of each role
    # The same of starts that failed, by (role, reason).
    start_failures: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def at_zero(self) -> bool:
        """Some pool is to have no worker, and not because none would start."""
        return any(
            not target and self.reasons.get(role) != "start_failures"
            for role, target in self.targets.items()
        )

    @property
    def failing(self) -> tuple[StartFailure, ...]:
        """Of roles whose workers do not start again and again."""
        return tuple(failure for failure in self.failures if failure.in_a_row >= MANY)

    def new_failures(self, before: Pools) -> tuple[StartFailure, ...]:
        """Those that were not known ``before``."""
        return tuple(failure for failure in self.failures if failure not in before.failures)


def targets(wanted: Iterable[tuple[str, int]], pools: Pools) -> dict[str, int]:
    """Workers that there should be, by role. ``wanted``: of pools whose size is fixed."""
    return {**dict(wanted), **pools.targets}


def lacking(there: Collection[str], pools: Pools) -> str:
    """What is missing, of which there is no pair. ``there``: roles of workers that take work."""
    missing = " and ".join(f"no {role} worker" for role in SCALED if role not in there)
    said = f"{missing} has started" if missing else "no prefill and decode workers are proven yet"
    for failure in pools.failing:
        said += f"; {failure.role} workers have failed to start {failure.in_a_row} times in a row"
    return said


def report(
    pools: Pools, wanted: Mapping[str, int], actual: Mapping[tuple[str, str], int], now: float
) -> dict[str, Any]:
    """For ``GET /internal/state``. ``actual``: workers by role and state; ``now``: time of day."""
    roles = [*wanted, *sorted({role for role, _ in actual} - set(wanted))]
    return {
        "pools": {
            role: {
                "target": wanted.get(role),  # None: nobody has said
                "actual": {state: n for (its, state), n in sorted(actual.items()) if its == role},
                "scales": role in pools.targets,
                "reason": pools.reasons.get(role, ""),
                "words": pools.words.get(role, ""),
            }
            for role in roles
        },
        "start_failures": [
            {
                "role": failure.role,
                "worker": failure.worker,
                "reason": failure.reason,
                "message": failure.message,
                "in_a_row": failure.in_a_row,
                "seconds_ago": round(max(0.0, now - failure.at), 1),
            }
            for failure in pools.failures
        ],
    }


@dataclass
class Asked:
    """What was asked of one router since it started, and answered. Only ever grows.

    An answer counts when it is asked for, whether it then runs, waits for a worker or finds the
    queue full; not when it could never be given, nor when it was refused unread, at zero.
    """

    requests: int = 0  # answers: each choice is one
    prompt_tokens: int = 0
    prompt_squares: int = 0  # sum of the squares of each one's prompt tokens
    answers: int = 0  # those that have ended, in whatever way, and have a token
    answer_tokens: int = 0

    def arrived(self, prompt_tokens: int) -> None:
        """An answer is asked for."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.prompt_squares += prompt_tokens**2

    def ended(self, tokens: int) -> None:
        """An answer is over, with so many tokens."""
        if tokens:
            self.answers += 1
            self.answer_tokens += tokens


def scaling_stats(dispatcher: Dispatcher, ledger: Ledger) -> dict[str, float]:
    """What this router reports to who scales the pools: flat, and each a finite number.

    The last three are as of now, the others grow from its start.
    """
    asked, verdicts = dispatcher.door.asked, ledger.verdicts
    waiting = dispatcher.queue.waiting()
    return {
        "requests": float(asked.requests),
        "prompt_tokens": float(asked.prompt_tokens),
        "prompt_squares": float(asked.prompt_squares),
        "answers": float(asked.answers),
        "answer_tokens": float(asked.answer_tokens),
        "ttft_good": float(verdicts["ttft", "good"]),
        "ttft_bad": float(verdicts["ttft", "bad"]),
        "tpot_good": float(verdicts["tpot", "good"]),
        "tpot_bad": float(verdicts["tpot", "bad"]),
        "queued": float(waiting.answers),  # without a pair of workers
        "queued_tokens": float(waiting.tokens),  # of their prompts
        "oldest_wait_s": waiting.oldest_s,
    }
