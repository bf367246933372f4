"""Text to ids and back: encoding, the chat template, streaming text with stop strings.

Reads the tokenizer, template and configuration files of a model folder; knows no weights, no engine
and no HTTP. Two kinds of tokenizers are taken: byte-level ones (GPT-2's way, as Llama 3, Qwen and
SmolLM have it), and SentencePiece's with byte fallback (Llama 2, Mistral 7B). In both every token
is a fixed string of bytes, so text can be streamed without decoding the answer again and again.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from router.chat_template import ChatTemplate, Message, TemplateError

__all__ = ["ByteTokenizer", "Detokenizer", "TemplateError", "Tokenizer", "TokenizerError"]


class TokenizerError(Exception):
    """The tokenizer of a model folder cannot be used."""


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, as characters → byte.

    Bytes that are printable in Latin-1 stand for themselves, the others for characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_alphabet()
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token of one byte
SPACE = "▁"  # U+2581, SentencePiece's space


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level tokenizer is."""
    try:
        return bytes(BYTE_OF[c] for c in token)
    except KeyError:  # an added token whose text is not in the alphabet stands for itself
        return token.encode()


def piece_bytes(token: str) -> bytes:
    """The bytes that a token of SentencePiece is."""
    if match := BYTE_PIECE.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace(SPACE, " ").encode()


def read_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a token becomes bytes, and whether a text loses the space that encoding put before it.

    Raises :class:`TokenizerError` for a decoder that does anything else to tokens.
    """
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if (
        kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
        and (steps[0]["pattern"], steps[0]["content"]) == ({"String": SPACE}, " ")
        and all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in steps[3:])
    ):
        return piece_bytes, len(steps) == 4
    raise TokenizerError(
        f"decoder {', '.join(map(str, kinds))} is not supported; supported: ByteLevel, and "
        "SentencePiece's Replace, ByteFallback, Fuse and Strip"
    )


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        """``vocab_size``: rows of the model's embedding, which may be more than tokens."""
        self._as_bytes, self.strips_space = read_decoder(backend)
        self._backend = backend
        self._template = template
        self._bytes: dict[int, bytes] = {}  # token_bytes, as far as asked for
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        # Some files name an end that the model has no row for: it never comes, and workers would
        # refuse every request that asks to stop there.
        self.eos_ids = tuple(i for i in eos_ids if 0 <= i < self.vocab_size)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Open the tokenizer of a model folder; raises :class:`TokenizerError`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for what it cannot read
            raise TokenizerError(f"cannot read {path}: {error}") from error
        model, generation, settings = (
            read_json(folder / f"{n}.json")
            for n in ("config", "generation_config", "tokenizer_config")
        )
        special = special_tokens(settings)
        put_around(backend, settings, special)
        eos = generation.get("eos_token_id")
        eos = model.get("eos_token_id") if eos is None else eos
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int for i in eos_ids):
            raise TokenizerError(f"{folder}: eos_token_id is {eos!r}, not ids")
        if "eos_token" in special and (i := backend.token_to_id(special["eos_token"])) is not None:
            eos_ids = [*eos_ids, i]  # a model tuned to another end often says so only here
        try:
            template = load_template(folder, settings.get("chat_template"), special)
        except TemplateError as error:
            raise TokenizerError(f"{folder}: {error}") from error
        return cls(backend, tuple(dict.fromkeys(eos_ids)), model.get("vocab_size"), template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Special tokens written out in it are taken as such, as vLLM does.

        ``add_special_tokens``: also put what the model wants around a text, as a bos token. A lone
        surrogate, which JSON can carry but UTF-8 cannot, counts as U+FFFD.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, follows_text: bool = False
    ) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        ``follows_text``: keep the space at the beginning that a text of its own would not have.
        """
        data = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids)
        if self.strips_space and not follows_text:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What one id adds to the answer's UTF-8; nothing for an id without a token."""
        if skip_special_tokens and token_id in self._special:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._as_bytes(self._backend.id_to_token(token_id) or "")
            self._bytes[token_id] = known
        return known

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise ValueError, naming the first id that the model has no embedding for."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"token id {token_id} is out of the vocabulary (0 to {self.vocab_size - 1})"
                )

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation; raises :class:`TemplateError` with the reason."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self._template.render(messages, add_generation_prompt, template_kwargs)

    def encode_chat(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of :meth:`render_chat`. The template writes all special tokens, so none are added."""
        text = self.render_chat(messages, add_generation_prompt, **template_kwargs)
        return self.encode(text, add_special_tokens=False)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; empty when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"cannot read {path}: it holds no JSON object")
    return value


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that tokenizer_config.json names, by role."""
    special = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(role)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            special[role] = token
    return special


def put_around(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Let ``add_bos_token`` and ``add_eos_token`` decide what encoding puts around a text.

    Where tokenizer_config.json has one of them, ``transformers`` follows them and not the
    ``tokenizer.json``, which some models wrote without.
    """
    if not any(isinstance(settings.get(f"add_{n}_token"), bool) for n in ("bos", "eos")):
        return
    template, used = ["$A"], {}
    for name, at in (("bos_token", 0), ("eos_token", 2)):
        token = special.get(name) if settings.get(f"add_{name}") is True else None
        token_id = None if token is None else backend.token_to_id(token)
        if token is not None and token_id is not None:
            template.insert(at, token)
            used[token] = token_id
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(used.items())
    )


def load_template(folder: Path, source: Any, special: Mapping[str, str]) -> ChatTemplate | None:
    """The chat template, from a file of its own or as tokenizer_config.json has it."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TemplateError("the chat template is neither a text nor a list of named ones")
    return ChatTemplate(source, special)


class ByteTokenizer(Tokenizer):
    """A tokenizer without a model, for tests: the ids are UTF-8 bytes, and 256 ends the answer.

    It is the real class over a vocabulary of single bytes, so that what is tested with it holds.
    """

    EOS = 256

    def __init__(self) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
        source = (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        super().__init__(backend, (self.EOS,), template=ChatTemplate(source, {}))


class Detokenizer:
    """The text of one answer while its ids arrive.

    What :meth:`push` and :meth:`finish` return, joined, is ``tokenizer.decode`` of all ids, cut at
    the first stop string. Two things are held back: the bytes of a character that is not complete,
    and text that may be the beginning of a stop string. The match that is complete first wins; of
    those complete at the same character, the one that begins first. So the result does not depend
    on how the ids were grouped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        follows_text: bool = False,
    ) -> None:
        """``include_stop``: the text ends after the stop string, else before it.

        ``min_tokens``: the text of the first so many ids is not searched for stop strings.
        ``follows_text``: as in :meth:`Tokenizer.decode`.
        """
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self.stopped: str | None = None
        self.num_tokens = 0  # ids taken, with the one that completed a stop string, none after it
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._strip = tokenizer.strips_space and not follows_text  # no text has come yet
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # complete characters, not yet returned: the beginning of some stop string

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids; returns the new text that is safe to send, often one token's."""
        texts = []
        for token_id in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            data = self._tokenizer.token_bytes(token_id, self._skip_special_tokens)
            if self._strip and data:
                data, self._strip = data.removeprefix(b" "), False
            texts.append(self._release(self._utf8.decode(data)))
        return "".join(texts)

    def finish(self) -> str:
        """The answer has ended: return what was held back, an incomplete character as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._release(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        """Add ``new`` to the held text, cut at a stop string, and return what need not be held."""
        if not new or not self._stop or self.num_tokens <= self._min_tokens:
            return new
        text = self._held + new
        found = [(i + len(stop), i, stop) for stop in self._stop if (i := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = len(text) - max(partial_match(text, stop) for stop in self._stop)
        self._held = text[keep:]
        return text[:keep]


def partial_match(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
