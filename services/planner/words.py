"""A profile as text and as what one worker can do by it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from services.planner.demand import batch_limit, prefill_need
from services.planner.fit import Fit, Point
from services.planner.observation import Observation, Seats, Window
from services.planner.profile import Profile

PROMPT = 512  # tokens of the prompts, and of the contexts, that capacity is told for
ANSWER = 128  # tokens of the answers
LONG_S = 1e6  # of a load that does not change: chance makes nothing of it


@dataclass(frozen=True)
class Objectives:
    """What users are to get."""

    ttft_s: float
    tpot_s: float
    attainment: float  # share of them


def fit_text(found: Fit) -> str:
    """Each point beside what the model says, how far it is off, and the model in words."""
    what = "tokens" if found.kind == "prefill" else "sequences"
    lines = [f"{found.kind:<8}{what:>10}{'context':>9}{'measured':>11}{'model':>11}{'error':>8}"]
    for point in sorted(found.points, key=lambda point: (point.context, point.size)):
        model = found.seconds(point.size, point.context)
        lines.append(
            f"{'':<8}{point.size:>10}{point.context:>9.0f}{duration(point.seconds):>11}"
            f"{duration(model):>11}{100 * found.error(point):>+6.0f} %"
        )
    middle, largest = 100 * found.median_error, 100 * found.largest_error
    worst = _named(found, found.worst)
    lines.append(f"  error: {middle:.1f} % in the middle, {largest:.0f} % at most ({worst})")
    return "\n".join([*lines, f"  {model_text(found)}"])


def model_text(found: Fit) -> str:
    """A line of the three coefficients, and one of what follows for usual steps."""
    step, each, pair = map(duration, found.half.values())
    if found.kind == "prefill":
        takes = found.seconds(PROMPT)
        return (
            f"{step} for a prompt, {each} for each token, {pair} for each token before that one\n"
            f"  so {PROMPT} tokens take {duration(takes)}, {PROMPT / takes:.0f} tokens/s"
        )
    one, eight = found.seconds(1, PROMPT), found.seconds(8, PROMPT)
    return (
        f"{step} for a step, {each} for each sequence, {pair} for each token of its context\n"
        f"  so a step of one sequence at {PROMPT} tokens takes {duration(one)}, of eight"
        f" {duration(eight)} ({8 / eight:.0f} tokens/s)"
    )


def _named(found: Fit, point: Point) -> str:
    if found.kind == "prefill":
        return f"{point.size} tokens behind {point.context:.0f}"
    sequences = "1 sequence" if point.size == 1 else f"{point.size} sequences"
    return f"{sequences} at a context of {point.context:.0f}"


def duration(seconds: float) -> str:
    """With a unit that makes three digits of it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= 0.9995 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return "0 s" if seconds < 1e-12 else f"{seconds / 1e-9:.2g} ns"


# --- capacity -------------------------------------------------------------------------------------


def prompts_per_s(profile: Profile, objectives: Objectives, tokens: int = PROMPT) -> float:
    """Prompts at random moments that the planner would give one prefill worker, at most."""
    takes = profile.prefill_s(tokens)
    if not 0 < takes <= objectives.ttft_s:
        return 0.0
    low, high = 0.0, 1 / takes
    for _ in range(30):
        rate = (low + high) / 2
        number = rate * LONG_S
        seen = Observation(0.0, long=Window(LONG_S, number, number * tokens, number * tokens**2))
        need = prefill_need(seen, profile, objectives.ttft_s, objectives.attainment)
        low, high = (rate, high) if need.workers <= 1 else (low, rate)
    return low


def answers_at_once(
    profile: Profile, objectives: Objectives, seats: Seats, context: int = PROMPT
) -> tuple[float, str]:
    """Answers that the planner would give one decode worker, and what bounds them."""
    if profile.decode_s(1, context) > objectives.tpot_s:
        return 0.0, "TPOT"
    seen = Observation(0.0, answer_tokens=ANSWER, seats=seats)
    return batch_limit(seen, profile, objectives.tpot_s, context)


def prefill_capacity(profile: Profile, objectives: Objectives) -> str:
    """A sentence."""
    objective = f"the first token within {duration(objectives.ttft_s)}"
    takes = profile.prefill_s(PROMPT)
    if takes > objectives.ttft_s:
        return f"no prompt of {PROMPT} tokens has {objective}: it takes {duration(takes)}"
    rate = prompts_per_s(profile, objectives)
    return (
        f"{rate:.2g} prompts/s of {PROMPT} tokens, {100 * objectives.attainment:.0f} % of them with"
        f" {objective}; {1 / takes:.2g} if they waited for each other as long as it takes"
    )


def decode_capacity(profile: Profile, objectives: Objectives, seats: Seats) -> str:
    """A sentence."""
    objective = f"{duration(objectives.tpot_s)} a token"
    takes = profile.decode_s(1, PROMPT)
    if takes > objectives.tpot_s:
        return f"no answer behind {PROMPT} tokens has {objective}: a step takes {duration(takes)}"
    batch, bound = answers_at_once(profile, objectives, seats)
    return (
        f"{batch:.0f} answers at once behind {PROMPT} tokens, each with {objective}; what bounds"
        f" them is {bound}"
    )
