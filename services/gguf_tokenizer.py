"""The tokenizer of a GGUF file as Hugging Face's ``tokenizer.json``, with llama.cpp's ids.

Two kinds: byte-level BPE with merges (``gpt2``: Llama 3, Qwen, SmolLM, Mistral's tekken) and
SentencePiece's pairs by score with byte fallback (``llama``: Llama 2, Mistral 7B). Knows the
metadata fields only: no weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from services.gguf_fields import ConvertError, Fields, get, write_json
from services.gguf_pre_tokenizers import Rule, pre_tokenizer, rule

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
SPECIAL = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
"""Types of tokens that are cut out of a text before all else; whether answers leave them out."""
ENDS_OF_TURN = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
)
"""Texts of tokens that end an answer whatever the file says of them; llama.cpp has these, too.

Files of Llama 3 name one end of the three that the model writes, some files the wrong one.
"""
SPACE = "▁"  # U+2581, SentencePiece's space


@dataclass(frozen=True)
class Vocabulary:
    """What the file says of its tokens."""

    kind: str  # gpt2 or llama
    pre: str | None  # llama.cpp's name of the pre-tokenizer, for gpt2
    tokens: list[str]  # by id
    types: list[int]  # by id
    roles: dict[str, int]  # ids of bos, eos, unknown, padding, eot (of a turn), eom (of a message)
    add_bos: bool
    add_eos: bool


def write_tokenizer(fields: Fields, folder: Path) -> Vocabulary:
    """Write the tokenizer's files into ``folder``, the chat template with them.

    Returns what was read of the tokens. Raises :class:`ConvertError`.
    """
    words = read_vocabulary(fields)
    build_tokenizer(fields, words).save(str(folder / "tokenizer.json"), pretty=False)
    config = tokenizer_config(words)
    arch = get(fields, "general.architecture")
    config["model_max_length"] = get(fields, f"{arch}.context_length")
    config["clean_up_tokenization_spaces"] = False
    write_json(folder / "tokenizer_config.json", config)
    ends = ends_of_answer(words)
    if ends and ends != [words.roles.get("eos")]:  # that one alone is in config.json
        write_json(folder / "generation_config.json", {"eos_token_id": ends})
    template = get(fields, "tokenizer.chat_template", None)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return words


def read_vocabulary(fields: Fields) -> Vocabulary:
    """The tokens and their roles, with llama.cpp's defaults for what the file does not say."""
    kind = get(fields, "tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConvertError(
            f"tokenizer model {kind!r} is not supported; supported: "
            "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    pre = get(fields, "tokenizer.ggml.pre", None) if kind == "gpt2" else None
    # An empty token cannot be looked up, and two of them would be one.
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(get(fields, "tokenizer.ggml.tokens"))]
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in fields:
        types = per_token(fields, "tokenizer.ggml.token_type", len(tokens))
    types = [CONTROL if t in ENDS_OF_TURN else k for t, k in zip(tokens, types, strict=True)]
    return Vocabulary(
        kind,
        pre,
        tokens,
        types,
        read_roles(fields, kind, len(tokens)),
        bool(get(fields, "tokenizer.ggml.add_bos_token", kind == "llama" or rule(pre).add_bos)),
        bool(get(fields, "tokenizer.ggml.add_eos_token", False)),
    )


def per_token(fields: Fields, name: str, size: int) -> list[Any]:
    """A field with one value for each token."""
    values: list[Any] = get(fields, name)
    if len(values) != size:
        raise ConvertError(f"the metadata field {name} has {len(values)} values for {size} tokens")
    return values


def read_roles(fields: Fields, kind: str, num_tokens: int) -> dict[str, int]:
    """The ids of the tokens that have a role."""
    roles = {"unknown": 0, "bos": 1, "eos": 2} if kind == "llama" else {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        token_id = get(fields, f"tokenizer.ggml.{name}_token_id", roles.get(name))
        if token_id is None:
            continue
        if token_id >= num_tokens:
            raise ConvertError(f"the {name} token is {token_id}, which is out of the vocabulary")
        roles[name] = token_id
    return roles


def build_tokenizer(fields: Fields, words: Vocabulary) -> Tokenizer:
    """The tokenizer of the vocabulary; raises :class:`ConvertError`."""
    vocab = {token: i for i, token in enumerate(words.tokens)}
    if len(vocab) != len(words.tokens):
        raise ConvertError("the vocabulary names some token twice")
    if words.kind == "gpt2":
        tokenizer = byte_level(get(fields, "tokenizer.ggml.merges"), rule(words.pre), vocab)
    else:
        scores = per_token(fields, "tokenizer.ggml.scores", len(vocab))
        prefix = get(fields, "tokenizer.ggml.add_space_prefix", True)
        tokenizer = sentence_pieces(scores, words.types, vocab, prefix)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=SPECIAL[kind], normalized=False)
            for token, kind in zip(words.tokens, words.types, strict=True)
            if kind in SPECIAL
        ]
    )
    around = around_text(words)
    if around is not None:
        tokenizer.post_processor = around
    return tokenizer


# --- byte-level BPE -------------------------------------------------------------------------------


def byte_level(merges: list[str], how: Rule, vocab: dict[str, int]) -> Tokenizer:
    """A BPE over GPT-2's characters of the bytes."""
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=how.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception for a bad merge
        raise ConvertError(f"the vocabulary and its merges do not fit: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(how, vocab)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# --- SentencePiece --------------------------------------------------------------------------------


def sentence_pieces(
    scores: list[float], types: list[int], vocab: dict[str, int], prefix: bool
) -> Tokenizer:
    """Neighbours merge while their join is a token, the join with the highest score first.

    ``prefix``: a text gets a space before it.
    """
    if lacking := [token for b in range(256) if (token := f"<0x{b:02X}>") not in vocab]:
        raise ConvertError(f"the vocabulary lacks {len(lacking)} bytes, the first is {lacking[0]}")
    merges = pairs_by_score(vocab, scores, types)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    # Every text between two special tokens begins with the space, so that words are the same there.
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    )
    return tokenizer


def pairs_by_score(
    vocab: dict[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Every two tokens whose join is a token, the best join first.

    Special tokens are cut out of the text before, so that none is ever joined.
    """
    pairs = []
    for token, i in vocab.items():
        if types[i] in SPECIAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[i], i, left, right))
    pairs.sort()
    return [(left, right) for _, _, left, right in pairs]


# --- special tokens -------------------------------------------------------------------------------


def around_text(words: Vocabulary) -> processors.PostProcessor | None:
    """What puts bos and eos around a text; None when neither is wanted."""
    template, used = ["$A"], {}
    for name, wanted, at in (("bos", words.add_bos, 0), ("eos", words.add_eos, 2)):
        if not wanted:
            continue
        if name not in words.roles:
            raise ConvertError(f"the GGUF lacks the metadata field tokenizer.ggml.{name}_token_id")
        token = words.tokens[words.roles[name]]
        template.insert(at, token)
        used[token] = words.roles[name]
    if not used:
        return None
    return processors.TemplateProcessing(single=template, special_tokens=list(used.items()))


def tokenizer_config(words: Vocabulary) -> dict[str, Any]:
    """The special tokens by their role, for ``tokenizer_config.json``."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if name in words.roles:
            config[f"{role}_token"] = words.tokens[words.roles[name]]
    config["add_bos_token"] = words.add_bos
    if words.add_eos:
        config["add_eos_token"] = True
    return config


def ends_of_answer(words: Vocabulary) -> list[int]:
    """The ids that end an answer: the eos first, then the ends of a turn, by field or by text.

    A padding token of its own is one, too: Qwen's is the end of a text.
    """
    named = [words.roles[name] for name in ("eot", "eom", "padding") if name in words.roles]
    ids = [words.roles["eos"]] if "eos" in words.roles else []
    ids += [i for i in named if words.types[i] == CONTROL]
    ids += [i for i, token in enumerate(words.tokens) if token in ENDS_OF_TURN]
    return list(dict.fromkeys(ids))
