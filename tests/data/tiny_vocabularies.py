"""Two small vocabularies as GGUF metadata: byte-level BPE, and SentencePiece with scores.

Both are trained on the strings that tokenizers are compared on, without cutting them first, so that
there are merges over every border that a pre-tokenizer may draw. Training them again may give other
merges with another version of ``tokenizers``: ``llamacpp_tokens.json`` holds the ones in use.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.data.tiny_gguf import alphabet

REFERENCE = Path(__file__).with_name("llamacpp_tokens.json")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = {
    "<unk>": UNKNOWN,
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<|endoftext|>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
    "[INST]": CONTROL,
    "[/INST]": CONTROL,
}
# Tokens that no merges lead to: only a pre-tokenizer that ignores merges finds them.
UNMERGED = ["zebra", "Ġzebra", "Zebra", "202", "Ġwecansee", "don", "ĠHTTPServer"]


def train_bpe(texts: list[str], num_merges: int) -> list[str]:
    """Merges over whole texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def train_pieces(texts: list[str], num_pieces: int) -> list[str]:
    """Joined pieces, the first merged first, then single characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces, limit_alphabet=200, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator([" " + text for text in texts], trainer)
    by_id = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    pieces = [token for _, token in by_id]
    return [p for p in pieces if len(p) > 1] + [p for p in pieces if len(p) == 1]


def bpe_fields(merges: list[str], pre: str) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary, for :func:`tests.data.tiny_gguf.write`."""
    special = list(SPECIAL)
    joined = [*alphabet(), *(m.replace(" ", "") for m in merges), *UNMERGED]
    ordinary = [token for token in dict.fromkeys(joined) if token not in SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": special + ordinary,
        "tokenizer.ggml.token_type": [SPECIAL[t] for t in special] + [NORMAL] * len(ordinary),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": special.index("<s>"),
        "tokenizer.ggml.eos_token_id": special.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": None,
    }


def spm_fields(pieces: list[str], prefix: bool) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: special tokens, bytes, and pieces by rank."""
    special = list(SPECIAL)
    octets = [f"<0x{b:02X}>" for b in range(256)]
    pieces = [piece for piece in pieces if piece not in {*special, *octets}]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": special + octets + pieces,
        "tokenizer.ggml.scores": [0.0] * (len(special) + 256)
        + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [SPECIAL[t] for t in special]
        + [BYTE] * 256
        + [NORMAL] * len(pieces),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
