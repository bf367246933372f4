"""What came of one request, as the report counts it (pure)."""

from dataclasses import dataclass

from tests.chaos.exchange import Reply

# Of an answer; the other ends of a request are named in tests.chaos.exchange. A suspect is not the
# mixed engine's answer, and not judged yet.
RIGHT, TIE, WRONG, SUSPECT = "right", "tie", "wrong", "suspect"


@dataclass
class Record:
    """One request: when, what, and what came of it."""

    number: int
    question: int
    stream: bool
    start_s: float
    end_s: float
    outcome: str  # right, suspect, or an end of tests.chaos.exchange
    reply: Reply
    flood: bool = False

    @property
    def answered(self) -> bool:
        return self.outcome in (RIGHT, TIE, WRONG, SUSPECT)


def same(reply: Reply, answer: Reply) -> bool:
    """Ids, text and finish reason of all choices, and the prompt's ids."""
    return (reply.choices, reply.prompt_ids) == (answer.choices, answer.prompt_ids)
