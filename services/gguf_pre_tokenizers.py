"""How llama.cpp cuts text before the merges of a byte-level BPE, by the name a GGUF gives.

``tokenizer.ggml.pre`` is a name and no pattern, so each has to be known. The rules here follow
llama.cpp, which sometimes cuts more coarsely than the model's first tokenizer did (``tekken``: its
letters have no case beyond ASCII and no combining marks): the files are made and used with it. The
regex engine of ``tokenizers`` knows Unicode 16, llama.cpp 15.1: characters new in 16 may be cut
otherwise.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from services.gguf_fields import ConvertError

CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def words(digits: str) -> str:
    """Llama 3's pattern, as Qwen 2 has it too: they differ in how they cut ``digits``."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{OTHERS}|{BLANKS}"


WORDS_WITH_MARKS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
)
# A word ends before a capital that follows a small letter; letters beyond ASCII count as both.
CAPITAL, SMALL = r"(?:(?![a-z])\p{L})", r"(?:(?![A-Z])\p{L})"
CAMEL_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}*{SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}+{SMALL}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
SEED_CODER = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}"
)


@dataclass(frozen=True)
class Rule:
    """One way to cut, and what else hangs on the name."""

    pattern: str | None  # a piece is one match; None: GPT-2's pattern, which ByteLevel has built in
    single_digits: bool = False  # every numeral is cut out first
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    add_bos: bool = False  # for a GGUF without `tokenizer.ggml.add_bos_token`


GPT2 = Rule(None)
SINGLE_DIGITS = Rule(None, single_digits=True)
LLAMA3 = Rule(words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
QWEN2 = Rule(words(r"\p{N}"))

RULES: dict[str, Rule] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), GPT2),
    **dict.fromkeys(("mellum", "gigachat", "a.x-4.0", "granite-docling"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), SINGLE_DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), LLAMA3),
    "smaug-bpe": Rule(words(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), QWEN2),
    "qwen35": Rule(WORDS_WITH_MARKS),
    "seed-coder": Rule(SEED_CODER),
    "tekken": Rule(CAMEL_CASE, ignore_merges=True, add_bos=True),
}
"""Every name that is supported."""


def rule(name: str | None) -> Rule:
    """The rule of a pre-tokenizer; raises :class:`ConvertError` for a name that is not known."""
    supported = ", ".join(sorted(RULES))
    if name is None or name == "default":
        raise ConvertError(
            "the GGUF does not say which pre-tokenizer its vocabulary needs (tokenizer.ggml.pre); "
            f"convert the model again with a current llama.cpp; supported: {supported}"
        )
    if name not in RULES:
        raise ConvertError(f"pre-tokenizer {name!r} is not supported; supported: {supported}")
    return RULES[name]


def pre_tokenizer(how: Rule, vocab: dict[str, int]) -> pre_tokenizers.PreTokenizer:
    """The steps of ``tokenizers`` that cut by ``how`` and turn bytes into GPT-2's characters."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    if how.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if how.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(how.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how.pattern is None))
    # Bytes that the vocabulary lacks give no token. `tokenizers` would drop them before merging, so
    # that their neighbours merge; llama.cpp drops them after it.
    if lacking := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab)):
        characters = "".join(f"\\x{{{ord(c):x}}}" for c in lacking)
        steps.append(pre_tokenizers.Split(Regex(f"[{characters}]"), "isolated"))
    return pre_tokenizers.Sequence(steps)
