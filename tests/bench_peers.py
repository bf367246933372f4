"""``make bench-peers``: Baton's engine against llama.cpp, and any server, by turns.

All of ``make bench-engine``, in one run with llama.cpp in processes of its own, which do nothing
while it is not their turn; it is built from source the first time. ``--url NAME=http://host:port``
adds a server that speaks OpenAI's API. Needs an idle machine. Status 1 when a target is missed.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from services.machine import calm_openmp

calm_openmp()  # as every worker does, before torch is imported

from services.fetch import ALIASES, fetch_gguf  # noqa: E402
from services.model_cache import cache_dir  # noqa: E402
from tests import bench_engine  # noqa: E402
from tests.bench_engine import FP32, INT8, build, conclude, prepare  # noqa: E402
from tests.support import bench  # noqa: E402
from tests.support.bench import Case, Contender, Results, Target, say, selected  # noqa: E402
from tests.support.llama_contender import KINDS, environment, llama_cpp, rewritten  # noqa: E402
from tests.support.url_peer import UrlPeer  # noqa: E402

LLAMA = "llama.cpp"
LLAMA_FP32, LLAMA_INT8 = f"{LLAMA} fp32", f"{LLAMA} Q8_0"


def models(model: str, who: list[str]) -> dict[str, Path]:
    """GGUF files by contender: the model's own, and rewritten in other formats."""
    source = fetch_gguf(model, report=say) if model in ALIASES else Path(model).expanduser()
    if source.suffix != ".gguf" or not source.is_file():
        say(f"{LLAMA} is left out: {model} is no GGUF file, nor made from one")
        return {}
    found = {}
    for name, kind in KINDS.items():
        path = cache_dir() / "peers" / f"{source.stem}-{name}.gguf"
        if not selected(who, f"{LLAMA} {name}"):
            continue
        if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
            say(f"writing {path}")
            path.parent.mkdir(parents=True, exist_ok=True)
            rewritten(source, path, kind)
        found[f"{LLAMA} {name}"] = path
    own = f"{LLAMA} {source.stem.rpartition('.')[2]}"
    if own not in found and selected(who, own):
        found[own] = source
    return found


def targets(results: Results) -> list[Target]:
    """What must hold between Baton and llama.cpp."""
    found = []
    for tokens in (512, 2048):
        times = results.ratio(FP32, LLAMA_FP32, Case(tokens))
        found.append(Target(f"{Case(tokens)}, fp32, by llama.cpp's", times, 1.3, unit=" times"))
    times = results.ratio(INT8, LLAMA_INT8, Case(256, 1))
    found.append(Target("decode 1 x 256, int8 by Q8_0", times, 1.5, unit=" times"))
    return found


def named_url(text: str) -> tuple[str, str]:
    """``NAME=URL``."""
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    return name, url


def main() -> int:
    """The exit status."""
    flags = bench_engine.parser(__doc__.splitlines()[0])
    flags.add_argument("--url", action="append", default=[], type=named_url, metavar="NAME=URL")
    flags.add_argument("--peer-python", type=Path, help="a Python that has llama_cpp already")
    args = flags.parse_args()
    setup, chosen = prepare(args)
    files = models(args.model, args.who)
    python = None
    if files:
        python = args.peer_python or environment(say)
    parts = build(setup, args.who)
    contenders: list[Contender] = list(parts.contenders)
    vocab = parts.shape.vocab
    with contextlib.ExitStack() as stack:
        for name, path in files.items():
            assert python is not None
            say(f"loading {name}")
            peer = llama_cpp(name, python, path, args.threads, vocab, setup.max_tokens)
            contenders.append(stack.enter_context(peer))
        contenders += [UrlPeer(name, url, vocab, setup.max_batch) for name, url in args.url]
        results = Results(parts.shape, forms=parts.machine.forms)
        extra = (lambda: parts.overheads(results)) if not args.only else (lambda: None)
        bench.run(results, contenders, chosen, args.rounds, parts.machine, extra)
    goals = bench_engine.targets(results) + targets(results)
    return conclude(args, results, goals, "bench-peers")


if __name__ == "__main__":
    sys.exit(main())
