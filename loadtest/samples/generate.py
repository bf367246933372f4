"""Makes the samples: invented requests in the public formats, the same ones each time.

Nothing in them comes from a real trace. Their shapes are made to resemble one in what matters for
a load test: heavy-tailed lengths, bursts, conversations that come back with all that was said.
``python -m loadtest.samples.generate [FOLDER]``.
"""

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 512
GREETINGS = ("Good morning", "Hello", "Please help", "One more question", "Dear assistant")
SUBJECTS = ("a tram line", "the harbour", "our garden", "two old clocks", "a loaf of rye bread")
WISHES = (
    "explain how {} is looked after through a year",
    "write a short story in which {} is lost and found again",
    "list what one should know before buying {}",
    "compare {} with what it was like a hundred years ago",
)


def mooncake(num_requests: int = 170) -> str:
    """Conversations in long prompts: each turn repeats those before it, behind a system prompt."""
    rng = np.random.default_rng(1)
    fresh = count()
    systems = [[next(fresh) for _ in range(blocks)] for blocks in (1, 2, 5)]
    open_chats: list[tuple[list[int], int]] = []  # whole blocks, and tokens behind them
    lines, at_ms = [], 0.0
    for _ in range(num_requests):
        at_ms += rng.exponential(300.0)
        if open_chats and rng.random() < 0.45:
            whole, rest = open_chats.pop(int(rng.integers(len(open_chats))))
        else:
            whole, rest = systems[int(rng.choice(3, p=(0.7, 0.2, 0.1)))], 0
        tokens = BLOCK * len(whole) + rest + 16 + int(min(rng.lognormal(7.2, 1.0), 12_000))
        answer = 1 + int(min(rng.lognormal(5.3, 0.8), 1_500))
        whole = whole + [next(fresh) for _ in range(tokens // BLOCK - len(whole))]
        ids = whole + [next(fresh)] * (tokens % BLOCK > 0)
        open_chats.append((whole, tokens % BLOCK + answer))
        line = {"timestamp": int(at_ms), "input_length": tokens, "output_length": answer}
        lines.append(json.dumps({**line, "hash_ids": ids}))
    return "\n".join(lines) + "\n"


def azure(year: int, num_requests: int = 150) -> str:
    """Prompts longer than answers; times as the year's file has them."""
    rng = np.random.default_rng(year)
    moment = datetime(year, 5, 10, 9, 30, tzinfo=UTC)
    rows: list[Sequence[Any]] = [("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    for i in range(num_requests):
        # To 1 µs; now and then a second is full, which 2024's file writes without a fraction.
        moment += timedelta(seconds=float(rng.gamma(0.5, 0.4)))
        if i % 50 == 0:
            moment = moment.replace(microsecond=0) + timedelta(seconds=1)
        to_100_ns = f"{moment:%Y-%m-%d %H:%M:%S.%f}{rng.integers(10)}"
        stamp = to_100_ns if year == 2023 else str(moment)
        tokens, answer = rng.lognormal((6.8, 4.8), (0.9, 0.8))
        rows.append((stamp, min(int(tokens) + 1, 7_500), min(int(answer) + 1, 1_000)))
    return _csv(rows)


def burstgpt(sessions: bool, num_requests: int = 120) -> str:
    """Bursts between silences; some requests fail and have no answer."""
    rng = np.random.default_rng(3 + sessions)
    added = ("Session ID", "Elapsed time") if sessions else ()
    tokens_of = ("Request tokens", "Response tokens", "Total tokens")
    rows: list[Sequence[Any]] = [("Timestamp", *added, "Model", *tokens_of, "Log Type")]
    at = 5.0
    for _ in range(num_requests):
        at += float(np.floor(rng.gamma(0.2, 15.0)))
        asked, answer = (int(n) + 1 for n in rng.lognormal((5.8, 5.2), (1.0, 0.7)))
        if rng.random() < 0.04:
            answer = 0
        model = ("ChatGPT", "GPT-4")[int(rng.random() < 0.2)]
        kind = ("Conversation log", "API log")[int(rng.random() < 0.3)]
        session = (f"{rng.integers(1 << 32):08x}", answer // 30) if sessions else ()
        stamp = at if sessions else int(at)
        rows.append((stamp, *session, model, asked, answer, asked + answer, kind))
    return _csv(rows)


def sharegpt(num_conversations: int = 18) -> str:
    """Questions and answers of invented texts; two entries are broken, as some real ones are."""
    rng = np.random.default_rng(5)
    entries = []
    for i in range(num_conversations):
        said = []
        for turn in range(int(rng.integers(1, 4))):
            wish = WISHES[int(rng.integers(len(WISHES)))]
            subject = SUBJECTS[int(rng.integers(len(SUBJECTS)))]
            hello = GREETINGS[int(rng.integers(len(GREETINGS)))]
            asked = f"{hello}: {wish.format(subject)}, in {rng.integers(2, 9)} sentences."
            told = [
                f"Part {turn + 1}.{k + 1} says that {subject} has {rng.integers(2, 99)} sides."
                for k in range(int(rng.integers(1, 9)))
            ]
            said += [{"from": "human", "value": asked}]
            said += [{"from": "gpt", "value": " ".join(told)}]
        entries.append({"id": f"sample{i}_0", "conversations": said})
    entries[7] = {"id": "sample7_0", "conversations": []}
    entries[15]["conversations"] = [{"from": "gpt", "value": "An answer to nothing."}]
    return json.dumps(entries, indent=0) + "\n"


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def samples() -> dict[str, str]:
    """File names and contents of all samples."""
    return {
        "mooncake.jsonl": mooncake(),
        "azure-2023.csv": azure(2023),
        "azure-2024.csv": azure(2024),
        "burstgpt.csv": burstgpt(sessions=False),
        "burstgpt-sessions.csv": burstgpt(sessions=True),
        "sharegpt.json": sharegpt(),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in samples().items():
        (folder / name).write_text(text, encoding="utf-8")
