"""Writes llamacpp_tokens.json: llama.cpp's ids of varied strings, for every pre-tokenizer.

Trains two small vocabularies, puts them into GGUF files with each name that is supported, and keeps
what llama.cpp makes of every string. Names that llama.cpp treats alike are kept as one. To make it
again, in an environment of its own::

    python3 -m venv /tmp/llama
    /tmp/llama/bin/pip install llama-cpp-python==0.3.36 gguf tokenizers
    /tmp/llama/bin/python -m tests.data.make_llamacpp_tokens
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from services.gguf_pre_tokenizers import RULES
from tests.data import tiny_vocabularies as tiny, token_strings as strings
from tests.data.tiny_gguf import write

TEXTS = list(
    dict.fromkeys(
        strings.ENGLISH
        + strings.NUMBERS
        + strings.SPACES
        + strings.SCRIPTS
        + strings.SYMBOLS
        + strings.CODE
        + strings.SPECIAL
        + strings.BORDERS
        + strings.LOSSY
        + strings.random_strings(60)
    )
)


def llama_ids(fields: dict[str, Any]) -> tuple[list[list[int]], bool]:
    """llama.cpp's ids of every text, and whether it adds a bos on its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiny.gguf")
        write(path, {}, change=fields)
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        ids = [model.tokenize(t.encode(), add_bos=False, special=True) for t in TEXTS]
        bos = model.tokenize(b"a", add_bos=True, special=True)[0]
        return ids, bos == fields["tokenizer.ggml.bos_token_id"]


def main() -> None:
    """Train, tokenize, write."""
    merges = tiny.train_bpe(TEXTS, 1200)
    pieces = tiny.train_pieces(TEXTS, 1000)
    vocabularies = {name: tiny.bpe_fields(merges, name) for name in RULES}
    vocabularies |= {
        "spm": tiny.spm_fields(pieces, True),
        "spm without a space before": tiny.spm_fields(pieces, False),
    }
    groups: list[dict[str, Any]] = []
    for name, fields in vocabularies.items():
        ids, adds_bos = llama_ids(fields)
        same = [g for g in groups if (g["ids"], g["adds_bos"]) == (ids, adds_bos)]
        if same:
            same[0]["names"].append(name)
        else:
            groups.append({"names": [name], "adds_bos": adds_bos, "ids": ids})
    tiny.REFERENCE.write_text(
        dump(
            {
                "origin": f"llama-cpp-python {llama_cpp.__version__}, make_llamacpp_tokens.py",
                "merges": merges,
                "pieces": pieces,
                "texts": TEXTS,
            },
            groups,
        )
    )
    print(f"{len(TEXTS)} texts;", "; ".join(", ".join(g["names"]) for g in groups))


def dump(head: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    """JSON with a line for each list of ids: a diff shows which text changed."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    blocks = [
        "{"
        + f'"names": {json.dumps(g["names"])}, "adds_bos": {json.dumps(g["adds_bos"])}, "ids": [\n'
        + ",\n".join(json.dumps(ids, separators=(",", ":")) for ids in g["ids"])
        + "\n]}"
        for g in groups
    ]
    return "{\n" + ",\n".join([*lines, '"groups": [\n' + ",\n".join(blocks) + "\n]"]) + "\n}\n"


if __name__ == "__main__":
    main()
