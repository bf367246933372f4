"""How long steps take: a time model of a prefill and a decode step (pure).

Prompts: ``a + b n + c n (context + n / 2)`` seconds for ``n`` tokens behind ``context`` others, the
products and the attention of a chunk. Decoding: ``d + e batch + f batch context``, the weights that
each step reads, what each sequence adds, and the KV that it reads. All coefficients are zero or
above, so that more work is never faster.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Coefficients in seconds; see the module."""

    prefill_step: float
    prefill_token: float
    prefill_pair: float  # of a token and one that it looks at
    decode_step: float
    decode_seq: float
    decode_pair: float  # of a sequence and a token of its context

    def prefill_s(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds for a prompt's next tokens."""
        pairs = num_tokens * (context + num_tokens / 2)
        return self.prefill_step + self.prefill_token * num_tokens + self.prefill_pair * pairs

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds for a step of ``batch`` sequences with a mean context."""
        return self.decode_step + batch * (self.decode_seq + self.decode_pair * context)

    def batch_within(self, seconds: float, context: float) -> float:
        """Sequences that a step of at most so many seconds has; may be below one, or infinite."""
        each = self.decode_seq + self.decode_pair * context
        left = seconds - self.decode_step
        return left / each if each > 0 else (float("inf") if left >= 0 else 0.0)
