"""Which tokens are computed in the next step (pure).

There are no phases. A sequence has ``num_tokens`` and ``num_computed``; a step spends a token
budget on the difference: one token for a sequence that generates, a chunk for one whose prompt is
not finished. Those with one token to compute come first, and chunks share a budget of their own, so
that a long prompt never stalls the others. What differs between a prefill, a decode and a mixed
worker is only what is sent to it.

A prompt that ends within this step goes before longer ones that began or came earlier, so that a
short question never waits for documents. What they lose that way is a debt, of one step's chunks at
most, and what they compute pays it back: passed all the time, they still get half of all chunks.
Nobody is passed at the price of a seat or of blocks: the first that waits finds both as before.

Preemption is by recompute: the youngest sequence gives its blocks back and starts over, prompt and
answer so far.

A waiting sequence that finds no room is passed by at most ``MAX_PASSED`` later ones in its life;
then nobody starts behind it but those that hold blocks already, which give them back.
"""

from collections import deque
from dataclasses import dataclass

from services.engine.blocks import BlockPool
from services.engine.budget import Budget, SchedulerStats
from services.engine.sequence import Key, SamplingParams, Sequence, Status

MAX_PASSED = 16
"""Later sequences that may start while an earlier one waits for room."""

NO_TOKEN = -1
"""Of a row that samples: what was computed is not a number."""

ERROR = "error"
NOT_FINITE = "the model's output is not a number: damaged KV or weights"


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step: compute ``ids`` at positions ``start`` and following."""

    key: Key
    ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]  # cover positions 0 .. start + len(ids)
    sample: bool  # the last id is the sequence's last: choose the token after it
    params: SamplingParams
    num_prompt: int

    @property
    def end(self) -> int:
        """Position of the token that this row samples; all before have KV after the step."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Plan:
    """All that a runner needs for one step. ``opened``: block generations to publish before the
    first write. ``spoiled``: blocks to zero after that.
    """

    rows: tuple[Row, ...]
    opened: tuple[tuple[int, int], ...]
    spoiled: list[int]


@dataclass(frozen=True)
class Output:
    """One new token of a sequence. ``finish``: "stop", "length", or "" when more follow; or ERROR,
    without a token.
    """

    key: Key
    index: int  # counted from the prompt's end
    token: int
    finish: str
    held: bool
    num_cached: int
    started: float  # when the sequence was first scheduled


class Scheduler:
    """Decides over the sequences of one engine; owns their order, not their blocks' contents."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        token_budget: int,
        max_num_seqs: int,
        max_model_len: int,
        chunk_budget: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.token_budget = token_budget
        self.chunk_budget = min(chunk_budget or token_budget, token_budget)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self._debt = 0  # tokens by which longer ones were passed, less those they computed since

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_owed(self) -> int:
        """Blocks that the sequences which are here already come to need before any newcomer: all
        that a waiting one lacks, and one more for each that runs.
        """
        lacking = (self.blocks_for(seq.num_tokens) - len(seq.blocks) for seq in self.waiting)
        return len(self.running) + sum(max(1, count) for count in lacking)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; it may already own blocks with ``num_computed`` tokens of KV (a
        hand-off).
        """
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence at any point and give its blocks back."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.status = Status.FINISHED

    def schedule(self, now: float) -> Plan:
        """Spend the token budget: on running sequences with one token to compute, oldest first,
        then on prompts that end within this step, then on chunks of the others that run, then on
        waiting ones in order.
        """
        budget = Budget(self.token_budget, self.chunk_budget)
        rows: list[Row] = []
        decoding: list[Sequence] = []
        chunked: list[Sequence] = []
        for seq in self.running:
            (decoding if seq.num_lacking == 1 else chunked).append(seq)
        for seq in decoding:
            # A younger one may have been preempted for an older one's sake.
            if budget.tokens > 0 and seq.status is Status.RUNNING and self._grow(seq):
                rows.append(self._row(seq, budget.take(1)))
        # They have had blocks for all their tokens since they started.
        chunked = [seq for seq in chunked if seq.status is Status.RUNNING]
        early = self._pass(chunked, budget, now)
        rows += early
        ended, left = {row.key for row in early}, budget.chunks
        for seq in chunked:
            if seq.key not in ended and budget.allows(seq):
                rows.append(self._row(seq, budget.take(seq.num_lacking)))
        rows += self._admit(budget, now)
        self._debt = max(0, self._debt - (left - budget.chunks))
        while not rows and (holder := self._holder_behind_first()):
            # Nothing runs, so nobody else will make room for the first in the queue.
            self._preempt(holder)
            rows += self._admit(budget, now)
        return Plan(tuple(rows), self.pool.take_opened(), self.pool.take_spoiled())

    def update(self, plan: Plan, tokens: list[int]) -> tuple[list[Output], list[tuple[int, int]]]:
        """Book a step that has run: ``tokens`` has one entry per row, ignored where the row does
        not sample.

        Returns the outputs, and the ``(block, even generation)`` pairs whose last write was in this
        step.
        """
        by_key = {seq.key: seq for seq in self.running}
        outputs: list[Output] = []
        sealed: list[tuple[int, int]] = []
        self.stats.steps += 1
        for row, token in zip(plan.rows, tokens, strict=True):
            seq = by_key[row.key]
            end = row.end
            if row.start < seq.num_prompt:
                self.stats.computed_prompt_tokens += min(end, seq.num_prompt) - row.start
            if row.sample and token == NO_TOKEN:
                outputs.append(self._discard(seq))
                continue
            sealed += self._advance(seq, end)
            if row.sample:
                outputs.append(self._append(seq, token))
                if seq.status is Status.HELD:
                    sealed += self._seal_tail(seq)
        return outputs, sealed

    def adopt(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Take KV of ``num_tokens`` tokens that arrived in the sequence's blocks as computed;
        returns the seals.
        """
        return self._advance(seq, num_tokens)

    # --- schedule ------------------------------------------------------------------------------

    def _grow(self, seq: Sequence) -> bool:
        """Give a running sequence blocks for all its tokens; False when it had to be preempted
        itself.
        """
        need = self.blocks_for(seq.num_tokens) - len(seq.blocks)
        if need <= 0:
            return True
        while need > self.pool.num_available:
            victim = self._victim()
            self._preempt(victim)
            if victim is seq:
                return False
        blocks = self.pool.allocate(need)
        assert blocks is not None
        seq.blocks += blocks
        return True

    def _pass(self, chunked: list[Sequence], budget: Budget, now: float) -> list[Row]:
        """Rows of those that end within this step, in order, as far as they may go before longer
        ones.
        """
        rows: list[Row] = []
        longer: list[Sequence] = []
        limit = budget.room
        for seq in [*chunked, *self.waiting]:
            if budget.room == 0:
                break
            count = self._lacking(seq)
            if count > budget.room:
                longer.append(seq)
                continue
            if longer and self._debt + count > limit:
                break
            if seq.status is Status.WAITING:
                if not (self._leaves_room(seq, longer) and self._try_admit(seq)):
                    break
                self._start(seq, now)
            rows.append(self._row(seq, budget.take(count)))
            self._debt += count if longer else 0
        else:
            self._debt = self._debt if longer else 0
        return rows

    def _leaves_room(self, seq: Sequence, longer: list[Sequence]) -> bool:
        """Whether there are a seat and blocks for a waiting sequence, and then still for the first
        that waits of those which it passes.
        """
        seqs = [seq, *[other for other in longer if other.status is Status.WAITING][:1]]
        need = sum(self.blocks_for(each.num_tokens) - len(each.blocks) for each in seqs)
        seats = self.max_num_seqs - len(self.running)
        return len(seqs) <= seats and need <= self.pool.num_available

    def _admit(self, budget: Budget, now: float) -> list[Row]:
        """Start waiting sequences in order, as far as seats, budget and room go.

        Behind one that may not start only those start that hold blocks already: they will give them
        back. Behind one that finds no room, a few others as well, see ``MAX_PASSED``.
        """
        rows: list[Row] = []
        passed: list[Sequence] = []  # those that found no room
        closed = False  # to those that hold no blocks
        for seq in list(self.waiting):
            if budget.tokens == 0 or len(self.running) >= self.max_num_seqs:
                break
            if closed and not seq.blocks:
                continue
            if not budget.allows(seq):
                closed = True
                continue
            if not self._try_admit(seq):
                passed.append(seq)
            else:
                self._start(seq, now)
                rows.append(self._row(seq, budget.take(seq.num_lacking)))
                for other in passed:
                    other.num_passed += 1
            closed = closed or any(other.num_passed >= MAX_PASSED for other in passed)
        return rows

    def _start(self, seq: Sequence, now: float) -> None:
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.started = seq.started or now

    def _holder_behind_first(self) -> Sequence | None:
        """The youngest waiting sequence that holds blocks, unless it is the first in the queue."""
        holders = [seq for seq in self.waiting if seq.blocks and seq is not self.waiting[0]]
        return holders[-1] if holders else None

    def _victim(self) -> Sequence:
        """The youngest sequence that holds blocks: queued with pulled KV first, then the last that
        runs.
        """
        for seq in reversed(self.waiting):
            if seq.blocks:
                return seq
        return self.running[-1]

    def _preempt(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.num_computed = 0
        seq.preempted += 1
        self.stats.preemptions += 1
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.waiting.appendleft(seq)
            seq.status = Status.WAITING

    def _cached(self, seq: Sequence) -> list[int]:
        """Blocks that a sequence without any would find in the cache now."""
        # The last token is always computed: its logits are needed, and they are not cached.
        full = (seq.num_tokens - 1) // self.block_size
        return self.pool.match(seq.name_block(i, self.block_size) for i in range(full))

    def _lacking(self, seq: Sequence) -> int:
        """Tokens that a sequence has to compute, were it to go on or to start now."""
        if seq.blocks:
            return seq.num_lacking
        return seq.num_tokens - len(self._cached(seq)) * self.block_size

    def _try_admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence the blocks for all its tokens, cached ones first, or change
        nothing.
        """
        if not seq.blocks:
            hit = self._cached(seq)
            self.pool.share(hit)
            fresh = self.pool.allocate(self.blocks_for(seq.num_tokens) - len(hit))
            if fresh is None:
                self.pool.release(hit)
                return False
            seq.blocks = hit + fresh
            seq.num_computed = len(hit) * self.block_size
            if not seq.preempted:
                seq.num_cached = min(seq.num_computed, seq.num_prompt)
                self.stats.cached_prompt_tokens += seq.num_cached
                self.stats.looked_up(seq.num_prompt, seq.num_cached)
            return True
        need = self.blocks_for(seq.num_tokens) - len(seq.blocks)
        if need > 0:
            fresh = self.pool.allocate(need)
            if fresh is None:
                return False
            seq.blocks += fresh
        return True

    def _row(self, seq: Sequence, count: int) -> Row:
        end = seq.num_computed + count
        return Row(
            key=seq.key,
            ids=tuple(seq.ids[seq.num_computed : end]),
            start=seq.num_computed,
            blocks=tuple(seq.blocks[: self.blocks_for(end)]),
            sample=end == seq.num_tokens,
            params=seq.params,
            num_prompt=seq.num_prompt,
        )

    # --- update --------------------------------------------------------------------------------

    def _advance(self, seq: Sequence, end: int) -> list[tuple[int, int]]:
        """Tokens up to ``end`` have KV now: seal and name the blocks that became full."""
        first, full = seq.num_computed // self.block_size, end // self.block_size
        seq.num_computed = end
        sealed = []
        for index in range(first, full):
            block = seq.blocks[index]
            if self.pool.generations[block] % 2:
                sealed.append((block, self.pool.seal(block)))
                self.pool.name(block, seq.name_block(index, self.block_size))
        return sealed

    def _append(self, seq: Sequence, token: int) -> Output:
        index = seq.num_generated
        seq.ids.append(token)
        self.stats.generated_tokens += 1
        finish = seq.finish_reason(self.max_model_len)
        held = seq.hold and not finish
        if held:
            self.running.remove(seq)
            seq.status = Status.HELD
        elif finish:
            self.remove(seq)
        return Output(seq.key, index, token, finish, held, seq.num_cached, seq.started)

    def _discard(self, seq: Sequence) -> Output:
        """End a sequence whose KV is not to be trusted: nobody shall find it in the cache."""
        self.running.remove(seq)
        self.pool.discard(seq.blocks)
        seq.blocks = []
        seq.status = Status.FINISHED
        return Output(
            seq.key, seq.num_generated, NO_TOKEN, ERROR, False, seq.num_cached, seq.started
        )

    def _seal_tail(self, seq: Sequence) -> list[tuple[int, int]]:
        """A held sequence writes no more: seal its last, partial block."""
        block = seq.blocks[-1]
        if self.pool.generations[block] % 2 == 0:
            return []
        return [(block, self.pool.seal(block))]
