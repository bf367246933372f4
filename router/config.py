"""Limits and choices of one router (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

LARGEST = 1e9  # of any number here: a time in seconds fits into a message, and is not "inf"
POLICIES = ("least-loaded", "round-robin")
MAY_BE_ZERO = ("max_bypass", "comeback_s", "keep_alive_s")
ABOVE_ZERO = (
    "max_queue", "queue_timeout_s", "request_timeout_s", "first_token_status_s",
    "max_body_bytes", "prefill_ahead", "prefill_attempts", "decode_attempts",
    "max_choices", "max_prompts", "max_stop_strings", "max_stop_chars",
    "slo_ttft_s", "slo_tpot_s", "wake_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class RouterConfig:
    """What an operator may set. The YAML block ``router:`` and flags are made of these fields."""

    policy: str = "least-loaded"  # how a pair is chosen: least-loaded or round-robin
    max_queue: int = 256  # requests that wait for a pair; the next one gets 429
    max_bypass: int = 16  # later requests that may overtake one that waits for more room
    queue_timeout_s: float = 60.0  # longest wait for a pair, then 429
    comeback_s: float = 1.5  # how long requests wait for workers that were lost to come back
    wake_timeout_s: float = 120.0  # how long requests wait for a worker to start, at zero
    request_timeout_s: float = 600.0  # from arrival to the last token, then 504
    first_token_status_s: float = 10.0  # a stream's status line waits so long for the first token
    keep_alive_s: float = 15.0  # silence in a stream after which a comment is sent; 0: never
    max_body_bytes: int = 8 * 1024 * 1024  # of one HTTP request
    prefill_ahead: float = 2.0  # steps of work a prefill worker may have before requests wait here
    prefill_attempts: int = 2  # prefills of one request that may fail before it does
    decode_attempts: int = 2  # the same for decodes
    early_pull: bool = True  # decode workers pull blocks while the prompt is still being computed
    link_faults: str = ""  # for tests: faults to inject into messages, "drop=0.01,delay=0.1,seed=7"
    max_choices: int = 16  # n of one request
    max_prompts: int = 64  # prompts in one completion request
    max_stop_strings: int = 16  # stop strings of one request
    max_stop_chars: int = 512  # characters of one stop string
    slo_ttft_s: float = 2.0  # objective: the first token within so long
    slo_tpot_s: float = 0.1  # objective: each token after it, on average
    metrics_public: bool = True  # GET /metrics on the API's port as well, without a key
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    api_keys_file: str = ""  # further keys, one per line; read again when it has changed

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"router.policy is {self.policy!r}; it can be {' or '.join(POLICIES)}")
        for name in MAY_BE_ZERO:
            if not 0 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"router.{name} must be a number from 0 to {LARGEST:g}")
        for name in ABOVE_ZERO:
            if not 0 < getattr(self, name) <= LARGEST:  # also not NaN
                raise ValueError(
                    f"router.{name} must be a number above zero and at most {LARGEST:g}"
                )


@dataclass(frozen=True)
class RouterSettings:
    """Everything one router process needs; made by the services, sent to where the router runs."""

    config: RouterConfig
    model_dir: str  # holds the tokenizer's files
    served_model: str  # the name that clients use
    router_id: str
    secret: bytes = field(repr=False)  # of the deployment; the workers have the same
    replicas: tuple[tuple[str, int], ...] = ()  # workers by role, as the operator wants them
    routers: int = 1  # of this deployment, the same
    wakes: bool = False  # pools may have no worker on purpose: requests wait until one has started
    metrics_host: str = "127.0.0.1"  # where its metrics port listens
    metrics_port: int = 0  # it, or the first free one after it; 0: any free one
    metrics_compat: str = ""  # whose names series have besides: "vllm"
    tracing_endpoint: str = ""  # see router.tracing
    tracing_ratio: float = 1.0
