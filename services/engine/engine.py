"""The engine: sequences in, tokens out (pure; the runner that owns tensors is passed in).

``step()`` is schedule → run → update. Everything here is called from one thread, between steps; so
a block that is given back is never written by a step that is still under way. In a pause of a step
all may be called that ends no sequence which computes.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.hashing import block_hashes
from services.engine.blocks import BlockPool, Hold
from services.engine.config import EngineConfig
from services.engine.scheduler import MAX_PASSED, Output, Plan, Scheduler
from services.engine.sequence import Key, SamplingParams, Sequence, Status


class Runner(Protocol):
    """What computes a plan. Returns one token per row (any value where the row does not sample,
    NO_TOKEN where what came out is not a number).
    """

    def run(self, plan: Plan) -> list[int]: ...

    def zero(self, blocks: list[int]) -> None:
        """Who was handed these out need not fill them. Attention gives no weight to what is behind
        a sequence's end, but nothing times infinity is not nothing.
        """

    def publish(
        self, opened: tuple[tuple[int, int], ...], sealed: list[tuple[int, int]]
    ) -> None: ...


@dataclass(frozen=True)
class Reservation:
    """Blocks set aside for a sequence whose KV will be pulled. The first ``num_cached`` hold it
    already.
    """

    blocks: tuple[int, ...]
    num_cached: int
    num_tokens: int
    salt: bytes

    @property
    def pulled(self) -> list[int]:
        """The others, which come by pulls."""
        return list(self.blocks[self.num_cached :])


class Engine:
    """One pool of blocks and the sequences that use it."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config = config
        self.runner = runner
        self.pool = BlockPool(config.kv_blocks, config.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            config.block_size,
            config.token_budget,
            config.max_num_seqs,
            config.max_model_len,
            config.chunk_budget,
        )
        self.stalled = False  # the last step had work but no room: only a command can help
        self.plan: Plan | None = None  # of the last step; no rows: it computed nothing
        self._seqs: dict[Key, Sequence] = {}
        self._reserved: dict[Key, Reservation] = {}
        self._quarantined: dict[Key, list[int]] = {}

    # --- sequences -----------------------------------------------------------------------------

    def add(
        self,
        key: Key,
        ids: list[int],
        num_prompt: int,
        params: SamplingParams,
        salt: bytes = b"",
        hold: bool = False,
    ) -> None:
        """Queue a sequence to be computed here from its first token on. ``hold``: see
        :meth:`take_held`. Blocks may still be in quarantine under the same key.
        """
        assert key not in self._seqs
        assert key not in self._reserved
        seq = Sequence(key, list(ids), num_prompt, params, salt, hold)
        self._seqs[key] = seq
        self.scheduler.add(seq)

    def step(self, now: float) -> list[Output]:
        """Compute one plan; returns the new tokens. ``now`` is any monotonic clock's time."""
        self.plan = plan = self.scheduler.schedule(now)
        self.stalled = not plan.rows
        if self.stalled:
            self.runner.publish(plan.opened, [])
            self.runner.zero(plan.spoiled)
            return []
        tokens = self.runner.run(plan)
        outputs, sealed = self.scheduler.update(plan, tokens)
        self.runner.publish((), sealed)
        for output in outputs:
            if output.finish:
                del self._seqs[output.key]
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether a step would have something to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def knows(self, key: Key) -> bool:
        """Whether the key names a sequence, a reservation, or blocks in quarantine."""
        return key in self._seqs or key in self._reserved or key in self._quarantined

    def abort(self, key: Key) -> None:
        """Drop a sequence or a reservation at any point (idempotent). Not for a pull in flight:
        :meth:`quarantine`.
        """
        seq = self._seqs.pop(key, None)
        if seq is not None:
            self.scheduler.remove(seq)
        reservation = self._reserved.pop(key, None)
        if reservation is not None:
            self.pool.release(reservation.blocks[: reservation.num_cached])
            self.pool.discard(reservation.pulled)

    def never_fits(self, num_tokens: int) -> str:
        """Why a sequence that grows to ``num_tokens`` can never run here, or ""."""
        if num_tokens > self.config.max_model_len:
            limit = self.config.max_model_len
            return f"{num_tokens} tokens exceed the model's maximum context length of {limit}"
        usable = self.pool.num_usable * self.config.block_size
        if num_tokens > usable:
            return f"{num_tokens} tokens exceed the KV pool of {usable} tokens"
        return ""

    # --- producer's side of a hand-off ---------------------------------------------------------

    def sealed_blocks(self, key: Key) -> list[tuple[int, int]]:
        """``(block, even generation)`` of the full blocks, in order, whose KV a sequence has so
        far, those from the prefix cache included. It may lose them again: a preemption starts over.
        """
        seq = self._seqs[key]
        full = seq.num_computed // self.config.block_size
        return [(block, self.pool.generations[block]) for block in seq.blocks[:full]]

    def take_held(self, key: Key) -> tuple[list[tuple[int, int]], list[int]]:
        """Lease out a held sequence: ``(block, even generation)`` pairs, and the ids whose KV they
        hold.
        """
        seq = self._seqs.pop(key)
        assert seq.status is Status.HELD
        self.pool.move(seq.blocks, Hold.ACTIVE, Hold.LEASED)
        pairs = [(block, self.pool.generations[block]) for block in seq.blocks]
        return pairs, seq.ids[: seq.num_computed]

    def end_lease(self, blocks: list[int]) -> None:
        """A lease was released or ran out."""
        self.pool.release(blocks, Hold.LEASED)

    # --- consumer's side -----------------------------------------------------------------------

    def reserve(self, key: Key, ids: list[int], salt: bytes = b"") -> Reservation | None:
        """Set aside blocks for the KV of ``ids``; cached ones are pinned. None when there is no
        room now.
        """
        assert not self.knows(key)
        hit = self.pool.match(block_hashes(ids, self.config.block_size, salt))
        self.pool.share(hit)
        need = self.scheduler.blocks_for(len(ids)) - len(hit)
        # Reservations cannot be preempted: whoever is here already, preempted ones too, goes first.
        owed = self.scheduler.num_owed
        fresh = self.pool.allocate(need) if need + owed <= self.pool.num_available else None
        if fresh is None:
            self.pool.release(hit)
            return None
        # Published now, not with the next plan: a pull may write to these blocks before that.
        self.runner.publish(self.pool.take_opened(), [])
        self.runner.zero(self.pool.take_spoiled())
        self.scheduler.stats.looked_up(len(ids), len(hit) * self.config.block_size)
        reservation = Reservation((*hit, *fresh), len(hit), len(ids), salt)
        self._reserved[key] = reservation
        return reservation

    def admit(self, key: Key, ids: list[int], num_prompt: int, params: SamplingParams) -> None:
        """The reservation's blocks hold verified KV now: queue the sequence behind it."""
        reservation = self._reserved.pop(key)
        seq = Sequence(key, list(ids), num_prompt, params, reservation.salt)
        seq.blocks = list(reservation.blocks)
        seq.num_computed = reservation.num_cached * self.config.block_size
        self.runner.publish((), self.scheduler.adopt(seq, reservation.num_tokens))
        self._seqs[key] = seq
        self.scheduler.add(seq)

    def quarantine(self, key: Key) -> None:
        """Drop a reservation into whose blocks bytes may still arrive: they stay used until
        :meth:`settle`.
        """
        reservation = self._reserved.pop(key)
        self.pool.release(reservation.blocks[: reservation.num_cached])
        self.pool.move(reservation.pulled, Hold.ACTIVE, Hold.QUARANTINED)
        self._quarantined[key] = reservation.pulled

    def settle(self, key: Key) -> None:
        """Nothing more arrives for a quarantined key."""
        self.pool.discard(self._quarantined.pop(key), Hold.QUARANTINED)

    @property
    def quarantined(self) -> set[Key]:
        """Keys whose blocks wait for :meth:`settle`."""
        return set(self._quarantined)

    def check_integrity(self) -> None:
        """Assert that every active or quarantined block is held by exactly those who count on it,
        and that the scheduler's sequences are ours.
        """
        self.pool.check_integrity()
        active: Counter[int] = Counter()
        for seq in self._seqs.values():
            active.update(seq.blocks)
        for reservation in self._reserved.values():
            active.update(reservation.blocks)
        assert active == self.pool.held(Hold.ACTIVE), "blocks and their holders differ"
        quarantined = Counter(b for blocks in self._quarantined.values() for b in blocks)
        assert quarantined == self.pool.held(Hold.QUARANTINED), "quarantine differs"
        assert not self._reserved.keys() & (self._seqs.keys() | self._quarantined.keys())
        self._check_sequences()

    def _check_sequences(self) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        held = [seq for seq in self._seqs.values() if seq.status is Status.HELD]
        everywhere = Counter(id(seq) for seq in (*waiting, *running, *held))
        assert everywhere == Counter(map(id, self._seqs.values())), "a sequence is lost or doubled"
        assert all(seq.status is Status.WAITING for seq in waiting)
        assert all(seq.status is Status.RUNNING for seq in running)
        assert len(running) <= self.config.max_num_seqs
        size = self.config.block_size
        for seq in self._seqs.values():
            assert seq.num_computed < seq.num_tokens <= self.config.max_model_len
            assert seq.num_computed <= len(seq.blocks) * size
            full = seq.blocks[: seq.num_computed // size]
            assert all(self.pool.generations[block] % 2 == 0 for block in full), "a full block open"
            assert seq.num_passed <= MAX_PASSED
