"""The tokenizer of a GGUF file as Hugging Face's ``tokenizer.json``.

Knows the metadata fields ``tokenizer.*`` only: no weights, no files.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from services.gguf_fields import ConvertError, get

TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def pre_tokenizer(name: str, vocab: dict[str, int]) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by the name that llama.cpp gives it."""
    if name != "smollm":
        raise ConvertError(f"pre-tokenizer {name!r} is not supported, only 'smollm'")
    # llama.cpp cuts out every \p{N} by itself, then runs GPT-2's regex over each piece.
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    # Bytes that the vocabulary lacks give no token. `tokenizers` would drop them before merging, so
    # that their neighbours merge; llama.cpp drops them after it.
    if lacking := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab)):
        characters = "".join(f"\\x{{{ord(c):x}}}" for c in lacking)
        steps.append(pre_tokenizers.Split(Regex(f"[{characters}]"), "isolated"))
    return pre_tokenizers.Sequence(steps)


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE of the GGUF's vocabulary and merges."""
    kind = get(fields, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConvertError(f"tokenizer model {kind!r} is not supported, only 'gpt2' (BPE)")
    tokens: list[str] = get(fields, "tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConvertError("the vocabulary names some token twice")
    split = pre_tokenizer(get(fields, "tokenizer.ggml.pre", "default"), vocab)
    merges = [tuple(m.split(" ", 1)) for m in get(fields, "tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises plain Exception for a bad merge
        raise ConvertError(f"the vocabulary and its merges do not fit: {error}") from error
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    types = get(fields, "tokenizer.ggml.token_type", [1] * len(tokens))
    special = {TOKEN_UNKNOWN: True, TOKEN_CONTROL: True, TOKEN_USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in special
        ]
    )
    if get(fields, "tokenizer.ggml.add_bos_token", False):
        bos = get(fields, "tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``: the special tokens by their role."""
    tokens = get(fields, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = get(fields, f"tokenizer.ggml.{name}_token_id", None)
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    config["add_bos_token"] = bool(get(fields, "tokenizer.ggml.add_bos_token", False))
    config["model_max_length"] = get(fields, "llama.context_length")
    config["clean_up_tokenization_spaces"] = False
    return config
