"""Every message between a router R and a worker, in the order of the conversation (pure; msgpack).

::

    R → worker   Hello            version, role, nonce          handshake: mutual HMAC challenge,
    worker → R   Challenge        version, nonce, proof         see ``router.link``
    R → worker   Proof            proof, wanted tickets
    worker → R   Welcome          worker card
    R → D        Reserve          ids; D first, so that nobody waits while holding
    D → R        Reserved | Refused
    R → P        Prefill          ids, sampling
    P → R → D    TicketPart …     early pull: blocks that are sealed while P computes the next
    P → R        Prefilled        first token, ticket (or Failed)
    R → D        Decode           ticket, prompt + first token
                                  (no ticket: D computes all, as a mixed worker does)
    D → R        UnknownPeer      → R sends Peer{card} and Decode again
    D → R        Pulled           → R sends Release to P
    R → P        Release | Renew
    D → R        Tokens …         the last one has a finish reason: that is the terminal message
    R → any      Abort            → Failed{kind="aborted"}, unless a terminal message is on its way
    R → any      Check            → Failed{kind="lost"} when the worker knows nothing of the request
    R → D        Forget           an incarnation of P is gone
    any → worker Drain            → Load{state="draining"}; what is left at the deadline is handed
                                  back: Failed{kind="draining"}
    both ways    Ping / Pong      each second; the pong carries the engine's step counter
    worker → R   Load             at least once a second, and on each change of state

For each (request, attempt) that R opened at a worker by Reserve, Prefill or Decode, the worker
sends exactly one terminal message: Refused, Prefilled, Tokens with ``finish``, or Failed. A Reserve
that was answered by Reserved stays open until its Decode ends, or an Abort.

How they become frames is in ``router.codec``. Token ids travel as packed little-endian u32.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.ticket import AgentCard
from router.codec import Codec, WireError as WireError

PROTOCOL_VERSION = 2
"""History: 1 first; 2 early parts, Check, Forget, Drain, numbers and checksums of frames.

Bump when an old peer could misread a message; not for a new field with a default.
"""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Numbers of tokens count from the prompt's end, over all attempts."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # u64; with (choice, position) it keys the noise of each token
    choice: int = 0
    stop_ids: tuple[int, ...] = ()  # end the answer, after min_tokens; eos is one unless ignored


@dataclass(frozen=True)
class WorkerCard:
    """One incarnation of a worker, as it registers itself."""

    worker_id: str
    epoch: int
    role: str  # prefill | decode | mixed
    model: str  # served model name
    host: str
    port: int
    pid: int
    layout: Mapping[str, Any]  # fields of kvtransfer.layout.KVLayout
    agents: tuple[AgentCard, ...]  # one per transport
    kv_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    weights_bytes: int = 0  # memory that the model takes
    local_prefill: bool = False  # a decode worker that also computes whole prompts of new requests
    metrics_port: int = 0  # for Prometheus; 0: none
    metrics_host: str = ""  # where that one is; empty: on ``host``


# --- handshake (router.link) ----------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First frame of a connection. ``epoch``: the worker's incarnation that the router expects."""

    version: int
    router_id: str
    router_epoch: int
    worker_id: str
    epoch: int
    nonce: bytes


@dataclass(frozen=True)
class Challenge:
    """The worker's nonce, and its proof that it knows the secret."""

    version: int
    nonce: bytes
    proof: bytes


@dataclass(frozen=True)
class Proof:
    """The router's proof, and its tickets that it still wants; its others are released."""

    proof: bytes
    tickets: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Welcome:
    """The handshake is over."""

    card: WorkerCard


@dataclass(frozen=True)
class Rejected:
    """The handshake failed; the connection is closed after this frame."""

    reason: str


# --- router to worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reserve:
    """Set aside blocks at D for ``ids``; blocks that D's prefix cache holds are pinned."""

    request: bytes
    attempt: int
    ids: bytes
    salt: bytes = b""
    deadline_ms: int = 0  # time left for the whole request, 0: none
    trace: str = ""  # W3C traceparent of the request's span; "" when it is not traced


@dataclass(frozen=True)
class Prefill:
    """Compute ``ids`` and sample the token at position ``len(ids)``.

    ``export``: keep the KV under a lease, for a ticket.
    """

    request: bytes
    attempt: int
    ids: bytes
    num_prompt: int
    sampling: Sampling
    salt: bytes = b""
    export: bool = True
    deadline_ms: int = 0
    early: bool = False  # send a TicketPart whenever a chunk has sealed blocks
    trace: str = ""


@dataclass(frozen=True)
class Decode:
    """Sample from position ``len(ids)`` on.

    With a ticket, pull the KV of its tokens first, into the reservation. An empty ticket needs no
    reservation: everything is computed here (mixed worker, recompute).
    """

    request: bytes
    attempt: int
    ids: bytes
    num_prompt: int
    sampling: Sampling
    ticket: bytes = b""
    salt: bytes = b""
    deadline_ms: int = 0
    trace: str = ""


@dataclass(frozen=True)
class Peer:
    """How D reaches P's pool; sent once per epoch of P, or when D says UnknownPeer."""

    card: AgentCard


@dataclass(frozen=True)
class Forget:
    """This incarnation of P is gone: D drops what it keeps of it, once no read is in flight."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class Release:
    """The KV of this ticket is not needed any more. Idempotent."""

    ticket_id: bytes


@dataclass(frozen=True)
class Renew:
    """Extend these leases. Answered by Expired for those that ran out already."""

    ticket_ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Abort:
    """Drop whatever this request holds, at any stage. Unknown requests are ignored."""

    request: bytes
    attempt: int


@dataclass(frozen=True)
class Check:
    """Nothing was heard of this for long. Answered, by Failed "lost", only if it is unknown."""

    request: bytes
    attempt: int


@dataclass(frozen=True)
class Drain:
    """Take no new work, finish or hand back the rest in time. A later deadline extends nothing."""

    deadline_ms: int


@dataclass(frozen=True)
class Ping:
    """Both ways, each second."""

    seq: int


# --- worker to router -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pong:
    """Answer to Ping. ``steps`` is the engine's step counter (0 from a router)."""

    seq: int
    steps: int = 0
    busy: bool = False  # the engine has work: with ``steps`` standing still, it hangs


@dataclass(frozen=True)
class Reserved:
    """D holds blocks for the request. ``cached_tokens``: of its prompt, already in D's cache."""

    request: bytes
    attempt: int
    cached_tokens: int


@dataclass(frozen=True)
class Refused:
    """The worker takes this on neither now (``retry``) nor ever (not ``retry``). Terminal."""

    request: bytes
    attempt: int
    reason: str
    retry: bool


@dataclass(frozen=True)
class TicketPart:
    """Blocks of a prompt that is still being computed; from P, passed on to D as it is.

    ``ticket`` is a signed :class:`kvtransfer.ticket.Ticket` with ``first_block``. It has no lease:
    if P gives the blocks up, the pull of this part fails and the final ticket covers them as well.
    """

    request: bytes
    attempt: int
    ticket: bytes


@dataclass(frozen=True)
class Prefilled:
    """The first token, and the ticket for the KV behind it. Terminal; the lease lives on by itself.

    ``finish`` is "stop" or "length" when the token ends the answer: then there is no ticket.
    ``ticket`` is opaque; id, lease and token count are repeated in clear for the router.
    """

    request: bytes
    attempt: int
    token: int
    cached_tokens: int
    finish: str = ""
    ticket: bytes = b""
    ticket_id: bytes = b""
    lease_ms: int = 0
    num_tokens: int = 0
    queue_ms: float = 0.0  # from arrival at P to the first chunk
    prefill_ms: float = 0.0  # from the first chunk to the token


@dataclass(frozen=True)
class Pulled:
    """The KV is verified in D's pool and the sequence is admitted; P may free its blocks."""

    request: bytes
    attempt: int
    num_blocks: int  # moved; the others were in D's prefix cache
    num_bytes: int
    pull_ms: float


@dataclass(frozen=True)
class UnknownPeer:
    """D has no card for this incarnation of P. The request stays open: Peer, then Decode again."""

    request: bytes
    attempt: int
    worker_id: str
    epoch: int


@dataclass(frozen=True)
class Expired:
    """These leases had run out before the renewal arrived; they stay ended."""

    ticket_ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Tokens:
    """New tokens; ``first_index`` counts from the prompt's end. A ``finish`` makes it terminal."""

    request: bytes
    attempt: int
    first_index: int
    ids: tuple[int, ...]
    finish: str = ""
    cached_tokens: int = 0  # prompt tokens not computed; in a mixed worker's first message
    queue_ms: float = 0.0  # in the first message: from its admission here to its first step ...
    compute_ms: float = 0.0  # ... and from there to the token; with a prompt, both are that one's


@dataclass(frozen=True)
class Failed:
    """The attempt ended without an answer. Terminal.

    ``kind``: aborted | pull (the KV could not be fetched or verified) | deadline | invalid (the
    request itself is wrong) | draining (handed back) | lost (the worker knows nothing of it) |
    internal.
    """

    request: bytes
    attempt: int
    kind: str
    message: str


@dataclass(frozen=True)
class Load:
    """What a worker is doing now. Counters only grow within an epoch."""

    state: str  # starting | ready | draining
    transport: str
    running: int
    waiting: int
    tickets: int  # exported, not yet released or expired
    waiting_tokens: int  # not yet computed, of waiting and running sequences
    blocks: Mapping[str, int]  # free, active, cached, leased, quarantined
    steps: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    pulled_bytes: int
    pulled_blocks: int
    preemptions: int
    failed_pulls: int
    expired_leases: int
    early_blocks: int = 0  # of the pulled ones, those that came before the ticket
    owed_blocks: int = 0  # of the free and cached ones: those that who is here will come to need
    agent_rebuilds: int = 0  # of the KV transport, to settle reads that did not end
    faults: Mapping[str, int] = field(default_factory=dict)  # injected into transfers, by kind
    flops: float = 0.0  # of all steps, counted from their plans
    bytes: float = 0.0  # that these had to move between memory and processor
    busy_s: float = 0.0  # seconds within steps
    peak_flops: float = 0.0  # per second: what this machine can do, measured at start; 0: unknown
    peak_bytes: float = 0.0  # per second, the same


Message = (
    Hello | Challenge | Proof | Welcome | Rejected
    | Reserve | Prefill | Decode | Peer | Forget | Release | Renew | Abort | Check | Drain
    | Ping | Pong
    | Reserved | Refused | TicketPart | Prefilled | Pulled | UnknownPeer | Expired | Tokens | Failed
    | Load
)  # fmt: skip

_CODEC: Codec[Message] = Codec(
    typing.get_args(Message), (Sampling, WorkerCard, AgentCard), PROTOCOL_VERSION
)
encode, decode, unpack = _CODEC.encode, _CODEC.decode, _CODEC.unpack
