"""What a load test is told: the fields are flags of ``baton loadtest``, the comments their help.

Knows nothing but the standard library, so that ``--help`` answers at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOptions:
    """The server, and how it is asked."""

    url: str = "http://127.0.0.1:8000"  # any OpenAI-compatible server, with or without /v1
    model: str = ""  # as the API calls it; empty: the first one of /v1/models
    endpoint: str = "chat"  # chat or completions
    prompts: str = "words"  # words; ids or ids:VOCABULARY, for completions; or a tokenizer.json
    api_key_file: str = ""  # a file that holds the key of the API
    ignore_eos: bool = True  # answers of exactly the length that was asked for
    temperature: float = 0.0
    timeout_s: float = 600.0  # of a request
    extra_body: str = ""  # JSON that goes into each request


@dataclass(frozen=True)
class WorkloadOptions:
    """What is asked, and when."""

    scenario: str = ""  # a YAML file, or one that is built in: see docs/loadtest.md
    scale: float = 1.0  # all lengths of the scenario by this
    input: str = "128"  # tokens of a prompt: 128, uniform:64..256, lognormal:200,0.8, choice:64,512
    output: str = "64"  # tokens of an answer, in the same words
    prefix: int = 0  # tokens at the front that prompts share
    prefixes: int = 1  # so many different ones
    turns: str = "1"  # turns of a conversation
    think: str = "0"  # seconds between an answer and the next turn
    trace: str = ""  # a file: Mooncake, Azure, BurstGPT or ShareGPT
    trace_format: str = "auto"  # mooncake, azure, burstgpt, sharegpt
    speed: float = 1.0  # the trace's time runs so much faster
    length_scale: float = 1.0  # the trace's lengths by this; what is shared stays shared
    max_input: int = 0  # longer prompts of a trace are left out, and counted; 0: none
    max_model_len: int = 0  # the server's context; 0: not checked here
    arrivals: str = "poisson"  # constant, poisson, gamma:0.25, bursts:4, ramp:0.5..2
    rate: float = 1.0  # requests/s
    duration_s: float = 0.0  # requests are sent for so long; 0: 60, or all of a trace
    requests: int = 0  # so many requests, instead of a duration
    concurrency: int = 0  # so many at a time, each sent when another ends, instead of a rate
    seed: int = 0  # the same seed asks the same at the same times
    slo: str = ""  # "ttft=500ms,tpot=50ms,e2e=10s"; with classes "chat:tpot=50ms;long:ttft=9s"


@dataclass(frozen=True)
class RunOptions:
    """How it is run, and where results go."""

    out: str = ""  # folder for requests.jsonl, summary.json, report.html; empty: a new one
    warmup: int = 2  # requests before it begins, which do not count
    grace_s: float = 0.0  # after Ctrl-C, for answers on their way
    find_max_rate: bool = False  # search the highest rate that meets the SLOs
    attainment: float = 0.9  # share of the requests that must meet all of them
    max_probes: int = 10  # runs of a search


@dataclass(frozen=True)
class CompareOptions:
    """Several targets by turns."""

    rates: str = ""  # requests/s to compare at: "0.5,1,2"; empty: --rate alone
    rounds: int = 3  # each round asks every target the same
    restart: bool = False  # managed targets are started anew for each turn, instead of kept up
