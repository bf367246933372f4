"""How much of what is asked was asked before: the prefix sharing of a trace, and of prompts.

A prompt is cut into blocks from its front; the last may be short, and counts like the others. A
block is *shared* when the same block, behind the same blocks, was asked before by any request: what
a prefix cache without limits would hold. The rate is blocks shared over blocks asked. The same rule
goes for the hash ids of a trace and for the tokens of prompts, wherever those were seen.

Knows no format and no server. A server that caches full blocks only, of its own size, and forgets
some of them, finds less: ``full_only`` leaves out the blocks that it never looks up.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.conversation import Text


@dataclass(frozen=True)
class Sharing:
    """Blocks that were asked, and how many of them had been asked before."""

    asked: int
    shared: int

    @property
    def rate(self) -> float:
        """Blocks shared over blocks asked; 0 where none were asked."""
        return self.shared / self.asked if self.asked else 0.0


def chain_sharing(prompts: Iterable[Iterable[Hashable]]) -> Sharing:
    """Count prompts given as their blocks, where equal blocks are equal values."""
    numbers: dict[tuple[int, Hashable], int] = {}  # (number of the chain before, block) → its own
    asked = 0
    for blocks in prompts:
        chain = 0
        for block in blocks:
            asked += 1
            chain = numbers.setdefault((chain, block), len(numbers) + 1)
    return Sharing(asked, asked - len(numbers))  # whatever is not the first of its kind


def words_or_ids(text: Text) -> Sequence[str] | Sequence[int]:
    """The tokens of a prompt as far as they are known without a tokenizer: words, or ids."""
    return text.split() if isinstance(text, str) else text


def prompt_sharing(
    prompts: Iterable[Text],
    block: int,
    *,
    full_only: bool = False,
    tokens: Callable[[Text], Sequence[str] | Sequence[int]] = words_or_ids,
) -> Sharing:
    """Count prompts cut into blocks of so many tokens. Holds digests of blocks, not prompts."""
    return chain_sharing(_digests(tokens(prompt), block, full_only) for prompt in prompts)


def _digests(tokens: Sequence[str] | Sequence[int], block: int, full_only: bool) -> Iterator[bytes]:
    end = len(tokens) - len(tokens) % block if full_only else len(tokens)
    for start in range(0, end, block):
        part = tokens[start : start + block]
        if isinstance(part[0], str):
            data = " ".join(map(str, part)).encode()
        else:
            data = np.asarray(part, dtype=np.int64).tobytes()
        yield hashlib.blake2b(data, digest_size=16).digest()
