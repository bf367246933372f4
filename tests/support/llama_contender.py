"""llama.cpp as a contender: its environment, its files, and the process that answers for it.

Its models are made from the GGUF that Baton's model comes from, so that all compute with the same
weights: rewritten in float32 and Q8_0, and as it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from services.model_cache import cache_dir, locked
from tests.support import bench_contenders
from tests.support.bench import Case, Timing

REQUIREMENT = "llama-cpp-python==0.3.36"
PROGRESS = re.compile(
    r"^\s*\[\d+/\d+\]|^(Collecting|Downloading|Building|Successfully|ERROR)|error:"
)
WEIGHTS = {"fp32": "float32", "Q8_0": "int8"}  # 34 bytes for 32 of them, as ours
KINDS = {"fp32": Kind.F32, "Q8_0": Kind.Q8_0}

Report = Callable[[str], None]


# --- environment ----------------------------------------------------------------------------------


def environment(report: Report) -> Path:
    """The Python of an environment with llama.cpp, built from source when there is none yet."""
    folder = cache_dir() / "peers" / REQUIREMENT.replace("==", "-")
    python, stamp = folder / "bin" / "python", folder / "installed"
    with locked(folder, report):
        if not stamp.exists():
            report(f"building {REQUIREMENT} in {folder}, once: some 15 minutes on two cores")
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            install(python, report)
            stamp.touch()
    return python


def install_command(python: Path) -> list[str]:
    """``-v`` passes the compiler's progress on; a wheel would be built for another processor."""
    command = [str(python), "-m", "pip", "install", "-v"]
    command += ["--disable-pip-version-check", "--no-binary=llama-cpp-python"]
    return [*command, REQUIREMENT]


def install(python: Path, report: Report) -> None:
    """Run pip and report how far the compiler is."""
    last: list[str] = []
    with subprocess.Popen(
        install_command(python), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-30:], line.rstrip()]
            if PROGRESS.search(line):
                report(f"  {line.strip()[:100]}")
    if process.returncode:
        said = "\n".join(last)
        raise SystemExit(f"cannot build {REQUIREMENT}, which needs a C++ compiler:\n{said}")


# --- models ---------------------------------------------------------------------------------------


def rewritten(source: Path, target: Path, kind: Kind) -> None:
    """The same model with all matrices in another format. Norms stay in float32, as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for name, entry in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        inner = entry.types[-1] if len(entry.types) > 1 else None
        writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    for tensor in reader.tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if values.ndim > 1 and kind is not Kind.F32:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


# --- contender ------------------------------------------------------------------------------------


@dataclass
class LlamaCpp:
    """One process with one model. Prompts in batches of 512, one sequence, greedy."""

    name: str
    weights: str
    process: subprocess.Popen[str]
    vocab: int
    max_tokens: int
    _numbers: Any = field(default_factory=lambda: np.random.default_rng(5))

    def can(self, case: Case) -> bool:
        return case.batch <= 1 and case.tokens < self.max_tokens

    def ids(self, count: int) -> list[int]:
        drawn: list[int] = self._numbers.integers(self.vocab // 2, self.vocab, count).tolist()
        return drawn

    def measure(self, case: Case) -> Timing:
        if not case.batch:
            return Timing(self.ask({"prefill": self.ids(case.tokens)}))
        b = bench_contenders
        request = {"decode": self.ids(case.tokens), "seconds": b.STEPS_S}
        taken = self.ask(
            {**request, "least": b.WARM_UP + b.MIN_STEPS, "most": b.WARM_UP + b.MAX_STEPS}
        )
        return b.in_the_middle(taken[b.WARM_UP :], case.tokens)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with status {self.process.wait()}")
        return json.loads(line)


@contextmanager
def llama_cpp(
    name: str, python: Path, model: Path, threads: int, vocab: int, max_tokens: int
) -> Iterator[LlamaCpp]:
    """Start it, and end it behind the block."""
    program = Path(__file__).with_name("llama_peer.py")
    command = [str(python), "-P", str(program), str(model), str(threads), str(max_tokens)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        weights = WEIGHTS.get(name.split()[-1], "")
        peer = LlamaCpp(name, weights, process, vocab, max_tokens)
        try:
            assert peer.answer() == "ready"
            yield peer
        finally:
            assert process.stdin is not None
            process.stdin.close()
