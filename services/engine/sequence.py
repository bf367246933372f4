"""One sequence of token ids on its way through the engine (pure).

::

    waiting ──scheduled──► running ──finish──► finished
       ▲                      │ └──first token, hold──► held ──► (exported, or dropped)
       └──────preempted───────┘
"""

from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.hashing import block_hash

Key = tuple[bytes, int]
"""Names a sequence: (request id, attempt). The engine only compares keys."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; counts are from the prompt's end."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # u64
    choice: int = 0
    stop_ids: tuple[int, ...] = ()


class Status(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"  # its token is out, its blocks are kept for an export
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """``ids[:num_computed]`` have their KV in ``blocks``; the rest is still to be computed."""

    key: Key
    ids: list[int]
    num_prompt: int
    params: SamplingParams
    salt: bytes = b""
    hold: bool = False  # stop after one token and keep the blocks
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that a prefix hit spared, at the first admission
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of full blocks, a chain
    status: Status = Status.WAITING
    preempted: int = 0
    num_passed: int = 0  # later sequences that started while this one waited for room
    started: float = 0.0  # when it was first scheduled, on the caller's clock

    @property
    def num_tokens(self) -> int:
        """All tokens so far, prompt and answer."""
        return len(self.ids)

    @property
    def num_lacking(self) -> int:
        """Tokens whose KV is still to be computed; one when only the next token is."""
        return len(self.ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, also those that another worker sampled."""
        return len(self.ids) - self.num_prompt

    def name_block(self, index: int, block_size: int) -> bytes:
        """The name of full block ``index``; blocks are named in order."""
        while len(self.names) <= index:
            i = len(self.names)
            parent = self.names[-1] if self.names else b""
            tokens = self.ids[i * block_size : (i + 1) * block_size]
            assert len(tokens) == block_size, "only full blocks have names"
            self.names.append(block_hash(parent, tokens, block_size, self.salt))
        return self.names[index]

    def finish_reason(self, max_model_len: int) -> str:
        """Why the answer ends with the last token: "stop", "length", or "" when it goes on."""
        if self.ids[-1] in self.params.stop_ids and self.num_generated >= self.params.min_tokens:
            return "stop"
        if self.num_generated >= self.params.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return ""
