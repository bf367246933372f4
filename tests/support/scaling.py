"""``baton serve`` with a small model and pools that scale, seen and disturbed from outside.

Workers of one machine share its cores: each step takes as long as a declared pace says, so that two
workers do twice the work of one.
"""

import contextlib
import http.client
import re
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.fetch import DEFAULT_MODEL, fetch
from services.serve import get
from tests.support.reference import Judge
from tests.support.serving import Served, served, until
from tests.support.tiny_model import SHAPE, save_model

MAX_MODEL_LEN = 1024
START_S = 90  # for a worker to start, on two cores that others use as well
ROLES = ("prefill", "decode")
PROMPT_TOKEN_S, STEP_S, SEQ_S = 0.002, 0.02, 0.01
PACE = {
    "prefill": f"prompt_token={PROMPT_TOKEN_S}",
    "decode": f"step={STEP_S},seq={SEQ_S}",
}
PROCESSES = {
    "prefill": "ray::ServeReplica:baton:PrefillWorker",
    "decode": "ray::ServeReplica:baton:DecodeWorker",
    "router": "ray::ServeReplica:baton:Router",
    "registry": "ray::RegistryActor",
    "controller": "ray::ServeController",
}


def small_model(parent: Path) -> Path:
    """A folder with a model of random weights and the default model's tokenizer."""
    folder = parent / "small"
    shape = replace(SHAPE, vocab_size=49_152, max_model_len=MAX_MODEL_LEN)
    save_model(folder, shape)
    for file in fetch(DEFAULT_MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


def judge_of(folder: Path) -> Judge:
    """Of a model's folder: ``transformers`` reads it by its own code."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Judge(model.eval())


def prompt(number: int, length: int = 200) -> list[int]:
    """Token ids; each number has other ones from the first on."""
    return [100 + (number * 997 + k * 31) % 40_000 for k in range(length)]


def config(
    model: Path,
    prefill: tuple[int, int, int] = (0, 1, 2),
    decode: tuple[int, int, int] = (0, 1, 2),
    **changes: Any,
) -> dict[str, Any]:
    """The YAML of a deployment that decides quickly. Of each pool min, first size, max; ``changes``
    are keys of ``autoscaling``, of its pools, of ``router``, or else of the deployment.
    """
    sizes = dict(zip(ROLES, (prefill, decode), strict=True))
    quick = {"up_cooldown_s": 1.0, "down_after_s": 3.0, "cooldown_s": 2.0}
    quick |= {name: changes.pop(name) for name in list(changes) if name in quick}
    router = {"slo_ttft_s": 2.0, "slo_tpot_s": 0.1, "request_timeout_s": 120.0}
    router |= {name: changes.pop(name) for name in list(changes) if name in ROUTER_KEYS}
    scaling = {"interval_s": 0.5, "idle_s": 5.0, "start_s": 5.0, "attainment": 0.95}
    scaling |= {name: changes.pop(name) for name in list(changes) if name in scaling}
    pools = {
        role: {"min": low, "max": high, **quick} for role, (low, _, high) in sizes.items() if high
    }
    return {
        "model": str(model),
        "threads": 1,
        "token_budget": 128,
        "kv_blocks": 400,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "drain_s": 2,
        "router": router,
        **{role: {"replicas": first, "pace": PACE[role]} for role, (_, first, _) in sizes.items()},
        "autoscaling": {**scaling, **pools},
        **changes,
    }


ROUTER_KEYS = ("max_queue", "wake_timeout_s", "queue_timeout_s")


@contextlib.contextmanager
def scaled(settings: dict[str, Any], folder: Path) -> Iterator["Scaled"]:
    """``baton serve`` with these settings, which are written to ``folder``."""
    file = folder / "baton.yaml"
    file.write_text(yaml.safe_dump(settings))
    with served("--config", str(file)) as server:
        yield Scaled(server)


@dataclass
class Scaled:
    """A deployment whose pools scale."""

    server: Served

    def state(self) -> dict[str, Any]:
        """Of ``GET /internal/state``."""
        status, state = self.server.get("/internal/state")
        assert status == 200, state
        return dict(state)

    def targets(self) -> tuple[int, int]:
        """Of prefill and decode."""
        pools = self.state()["pools"]
        return tuple(pools[role]["target"] for role in ROLES)  # type: ignore[return-value]

    def workers(self) -> list[dict[str, Any]]:
        """Those that live; a router remembers others for a while."""
        return [w for w in self.server.workers() if w["state"] not in ("left", "dead")]

    def ready(self, role: str) -> list[dict[str, Any]]:
        """Workers that are in a proven pair, by age."""
        state = self.state()
        proven = {pair[role] for pair in state["pairs"] if pair["state"] == "proven"}
        return [w for w in state["workers"] if w["id"] in proven and w["state"] == "ready"]

    def ask(self, number: int, num_tokens: int = 4, salt: str = "asked", of: int = 0) -> list[int]:
        """Ids of an answer to ``prompt(number)``, or to one ``of`` so many. It is in no cache."""
        ids = prompt(number % of if of else number)
        return self.server.complete_ids(ids, num_tokens, cache_salt=f"{salt} {number}")

    def settle(self, prefill: int, decode: int, timeout_s: float = START_S) -> None:
        """Wait until the pools are to have, and have, so many workers, and no others are left."""

        def there() -> bool:
            sizes = [len(self.ready(role)) for role in ROLES]
            return sizes == [prefill, decode] == list(self.targets()) and len(
                self.workers()
            ) == prefill + decode == len(self.processes(*ROLES))

        self._until(there, f"{prefill} prefill and {decode} decode workers", timeout_s)

    def both_fail(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """Wait until a start of each role has failed; what each says."""

        def both() -> bool:
            return len(self.failures()) == len(ROLES)

        self._until(both, "workers fail to start", timeout_s)
        return self.failures()

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait; if in vain, say in what state the deployment is."""
        try:
            until(condition, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state()}") from None

    def failures(self) -> dict[str, dict[str, Any]]:
        """The last start that failed, by role."""
        return {failure["role"]: failure for failure in self.state()["start_failures"]}

    def metric(self, name: str, **labels: str) -> float:
        """A value of ``GET /metrics``."""
        status, text = get(f"{self.server.url}/metrics")
        assert status == 200
        for line in text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(
                f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()
            ):
                return float(found[2])
        raise AssertionError(f"no {name} with {labels} in:\n{text}")

    def processes(self, *kinds: str) -> list[psutil.Process]:
        """Of the deployment, those of these kinds (see PROCESSES), the oldest first."""
        starts = tuple(PROCESSES[kind] for kind in kinds)
        found = []
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith(starts):
                    found.append((process.create_time(), process))
        return [process for _, process in sorted(found, key=lambda one: one[0])]

    def logged(self, text: str, files: str = "worker-*.err") -> list[str]:
        """Lines of the processes' logs that have it, or of other ``files``."""
        folder = re.search(r"logs: (\S+), removed", self.server.text)
        assert folder, self.server.text
        return [
            line
            for file in sorted(Path(folder[1]).glob(files))
            for line in file.read_text(errors="replace").splitlines()
            if text in line
        ]


class Stream:
    """A stream that is read to whatever end it comes to, by a thread."""

    def __init__(self, server: Served, prompt: Sequence[int], num_tokens: int, salt: str) -> None:
        self.prompt = list(prompt)
        self.num_tokens = num_tokens
        self.ids: list[int] = []
        self.problem = ""
        self._begun = threading.Event()
        self._body = {
            "prompt": self.prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "cache_salt": salt,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._read, args=(server,), daemon=True)
        self._thread.start()

    def begun(self, timeout_s: float = 60.0) -> None:
        """Wait for the first token."""
        assert self._begun.wait(timeout_s), "no token came"
        assert not self.problem, self.problem

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def check(self, judge: Judge, timeout_s: float = 120.0) -> None:
        """Wait for its end, which must be a proper one, with the right text."""
        self._thread.join(timeout_s)
        assert self.over, f"{len(self.ids)} tokens so far"
        assert not self.problem, f"{self.problem}, after {len(self.ids)} tokens"
        assert len(self.ids) == self.num_tokens
        judge.check(self.prompt, self.ids)

    def _read(self, server: Served) -> None:
        try:
            for chunk in server.stream("/v1/completions", self._body):
                if chunk.get("error"):
                    self.problem = chunk["error"]["message"]
                for choice in chunk.get("choices", ()):
                    self.ids += choice.get("token_ids") or []
                if self.ids:
                    self._begun.set()
        except urllib.error.HTTPError as error:
            with error:
                self.problem = f"{error.code}: {error.read().decode(errors='replace')}"
        except (AssertionError, OSError, http.client.HTTPException) as error:
            self.problem = repr(error)
        self._begun.set()


class Beat:
    """Requests at a constant rate, whatever becomes of those before, until the block ends."""

    def __init__(self, rate: float, ask: Callable[[int], Any]) -> None:
        self.results: list[Any] = []  # in order, when it has ended
        self._rate, self._ask = rate, ask
        self._asked: list[Future[Any]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Beat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.results = [one.result() for one in self._asked]

    def _run(self) -> None:
        began = time.monotonic()
        with ThreadPoolExecutor(128) as pool:
            while not self._over.wait(max(0.0, self._next(began) - time.monotonic())):
                self._asked.append(pool.submit(self._ask, len(self._asked)))

    def _next(self, began: float) -> float:
        return began + len(self._asked) / self._rate


@dataclass
class Look:
    """What a router said at some moment."""

    at: float
    state: dict[str, Any]

    def target(self, role: str) -> int:
        return int(self.state["pools"][role]["target"])


@dataclass
class Watch:
    """Looks again and again, in a thread, until the block ends."""

    scaled: Scaled
    looks: list[Look] = field(default_factory=list)
    lost: int = 0  # looks that got no answer

    def __enter__(self) -> "Watch":
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            try:
                self.looks.append(Look(time.monotonic(), self.scaled.state()))
            except (OSError, AssertionError, http.client.HTTPException):
                self.lost += 1

    def sizes(self, role: str) -> list[int]:
        """Its targets, each time there was another one."""
        found: list[int] = []
        for look in self.looks:
            if look.target(role) not in found[-1:]:
                found.append(look.target(role))
        return found

    def drained(self, role: str) -> set[str]:
        """Workers that were seen at their last requests."""
        return {
            worker["id"]
            for look in self.looks
            for worker in look.state["workers"]
            if worker["role"] == role and worker["state"] == "draining" and worker["running"]
        }

    def early_birds(self) -> tuple[int, list[str]]:
        """How often a worker was seen that had no proven pair yet while others worked, and those
        of these that had other calls than their proofs.
        """
        seen, early = 0, []
        for look in self.looks:
            state = look.state
            tried = [p for p in state["pairs"] if p["state"] == "unproven"]
            known = {
                p[r] for p in state["pairs"] if p["state"] in ("proven", "unusable") for r in ROLES
            }
            for worker in state["workers"]:
                if worker["id"] in known or not known:
                    continue
                seen += 1
                proofs = sum(worker["id"] == pair[worker["role"]] for pair in tried)
                if worker.get("open_calls", 0) > proofs:
                    early.append(f"{worker['id']}: {worker['open_calls']} calls, {proofs} proofs")
        return seen, early
