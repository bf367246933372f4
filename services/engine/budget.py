"""What is left to compute in a step, and what was computed in all of them (pure)."""

from dataclasses import dataclass

from services.engine.sequence import Sequence


@dataclass
class Budget:
    """What is left to compute in a step. ``chunks`` is the part of it that rows of more than one
    token may take.
    """

    tokens: int
    chunks: int

    @property
    def room(self) -> int:
        """Tokens of the largest chunk that may still be computed."""
        return min(self.tokens, self.chunks)

    def allows(self, seq: Sequence) -> bool:
        """Whether the sequence could compute something."""
        return self.tokens > 0 and (seq.num_lacking == 1 or self.chunks > 0)

    def take(self, count: int) -> int:
        """Spend up to ``count`` tokens of one sequence; returns how many."""
        if count > 1:
            count = min(count, self.tokens, self.chunks)
            self.chunks -= count
        self.tokens -= count
        return count


@dataclass
class SchedulerStats:
    """Counters since the start."""

    steps: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    queried_tokens: int = 0  # of prompts and reservations, looked up in the prefix cache
    hit_tokens: int = 0  # of these, those whose KV was there

    def looked_up(self, num_tokens: int, num_hits: int) -> None:
        """So many tokens, once for each that came."""
        self.queried_tokens += num_tokens
        self.hit_tokens += num_hits
