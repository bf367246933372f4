"""llama.cpp behind a pipe: a request is a line of JSON, so is its answer.

Run as a file, by the Python of an environment that has ``llama_cpp`` and nothing of ours::

    python llama_peer.py MODEL.gguf THREADS MAX_TOKENS

``{"prefill": ids}`` → seconds from the ids to the first token. ``{"decode": ids, "least": n,
"most": m, "seconds": s}`` → seconds of each of some steps behind these ids. Of those only as many
are computed as there are not from earlier requests: what they say does not change the time.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp itself prints goes elsewhere
    from llama_cpp import Llama

    path, threads, max_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama = Llama(path, n_ctx=max_tokens, n_threads=threads, n_threads_batch=threads, verbose=False)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer("ready")
    known = 0  # tokens whose keys and values are there, up to the context's end
    for line in sys.stdin:
        request = json.loads(line)
        if "prefill" in request:
            ids = request["prefill"]
            llama.n_tokens = 0  # what follows is dropped by eval
            began = time.perf_counter()
            llama.eval(ids)
            llama.sample(temp=0.0)
            known = len(ids)
            answer(time.perf_counter() - began)
            continue
        ids = request["decode"]
        llama.n_tokens = min(known, len(ids) - 1)
        llama.eval(ids[llama.n_tokens :])
        taken: list[float] = []
        while len(taken) < request["least"] or (
            len(taken) < request["most"] and sum(taken) < request["seconds"]
        ):
            began = time.perf_counter()
            llama.eval([llama.sample(temp=0.0)])
            taken.append(time.perf_counter() - began)
        known = llama.n_tokens
        answer(taken)


if __name__ == "__main__":
    main()
