"""Encoding, the chat template and its refusals, on tokenizers made here."""

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from router.chat_template import ChatTemplate
from router.tokenizer import (
    BYTE_OF,
    ByteTokenizer,
    Detokenizer,
    TemplateError,
    Tokenizer,
    TokenizerError,
)

TOKENIZER = ByteTokenizer()
HELLO = [{"role": "user", "content": "Hello"}]
PIECE_STEPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def render(source: str, messages: list[dict[str, object]] = HELLO, **kwargs: object) -> str:
    """A template's output, with some special tokens."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, True, kwargs)


def write_model(folder: Path, **files: object) -> Path:
    """A model folder with a byte-level tokenizer; ``files`` are JSON values by stem."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.save(str(folder / "tokenizer.json"))
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return folder


# --- encoding -------------------------------------------------------------------------------------


def test_byte_ids_are_bytes() -> None:
    assert TOKENIZER.encode("aé\n") == list("aé\n".encode())
    assert TOKENIZER.eos_ids == (256,)
    assert TOKENIZER.vocab_size == 257


@given(st.text())
def test_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 256)), st.booleans())
def test_text_is_what_the_library_decodes(ids: list[int], skip: bool) -> None:
    expected = TOKENIZER._backend.decode(ids, skip_special_tokens=skip)
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == expected
    joined = b"".join(TOKENIZER.token_bytes(i, skip) for i in ids)
    assert joined.decode(errors="replace") == expected


def test_special_tokens_in_text_are_special() -> None:
    assert TOKENIZER.encode("a<eos>b") == [97, 256, 98]
    assert TOKENIZER.decode([97, 256, 98]) == "ab"
    assert TOKENIZER.decode([97, 256, 98], skip_special_tokens=False) == "a<eos>b"


def test_lone_surrogates_become_replacement_characters() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude00\udc00")) == "😀\ufffd"


def test_bad_ids_are_named() -> None:
    TOKENIZER.check_ids([0, 256])
    with pytest.raises(ValueError, match=r"token id 257 is out of the vocabulary \(0 to 256\)"):
        TOKENIZER.check_ids([1, 257, 300])
    with pytest.raises(ValueError, match="token id -1 "):
        TOKENIZER.check_ids([-1])


def test_added_tokens_outside_the_byte_alphabet_stand_for_themselves() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<｜end▁of▁sentence｜>", special=True)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(256, skip_special_tokens=False).decode() == "<｜end▁of▁sentence｜>"
    assert tokenizer.token_bytes(257) == b""
    assert tokenizer.decode([256, 257], skip_special_tokens=False) == "<｜end▁of▁sentence｜>"


# --- SentencePiece --------------------------------------------------------------------------------

WORDS = ["<s>", "▁", "▁Paris", "▁is", "▁▁", "a", "<x>▁y"]


def pieces(prefix: bool = True) -> Tokenizer:
    """256 bytes, then WORDS, of which the first is special; as Llama 2 and Mistral 7B have it."""
    tokens = [f"<0x{b:02X}>" for b in range(256)] + WORDS
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([*PIECE_STEPS, *strip])
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<x>▁y", special=False, normalized=False)])
    return Tokenizer(backend)


def piece_ids(*tokens: str) -> list[int]:
    """Ids of words, and of bytes as single characters up to U+00FF."""
    return [256 + WORDS.index(t) if t in WORDS else ord(t) for t in tokens]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["▁Paris", "▁is"], "Paris is"),
        (["▁▁", "▁Paris"], "  Paris"),  # one space is lost, not all
        (["<s>", "▁Paris"], "Paris"),
        ([" ", "a"], "a"),  # a space that is a byte
        (["▁"], ""),
        (["\xe6", "\xbc", "\xa2", "▁is"], "漢 is"),
        (["a", "▁"], "a "),
        (["<x>▁y"], "<x> y"),
    ],
)
def test_pieces_join_to_text(tokens: list[str], text: str) -> None:
    ids = piece_ids(*tokens)
    assert pieces().decode(ids) == text
    assert pieces()._backend.decode(ids) == text
    assert pieces(prefix=False).decode(ids) == pieces().decode(ids, follows_text=True)
    assert pieces(prefix=False).decode(ids) == pieces(prefix=False)._backend.decode(ids)


def test_special_pieces_are_shown_when_asked_for() -> None:
    ids = piece_ids("<s>", "▁Paris")
    assert pieces().decode(ids, skip_special_tokens=False) == "<s> Paris"


def test_broken_bytes_do_not_spoil_their_neighbours() -> None:
    """The library turns the whole run of byte tokens into U+FFFD, which no stream could."""
    ids = piece_ids("\xe6", "\xbc", "\xa2", "\xff", "\xe6", "a")
    assert pieces().decode(ids) == "漢\ufffd\ufffda"


def is_utf8(ids: list[int]) -> bool:
    """Whether every run of byte tokens is whole characters."""
    data = bytes(i if i < 256 else 0 for i in ids)
    return data.decode(errors="replace").encode() == data


@given(
    st.lists(
        st.sampled_from(piece_ids(*WORDS)).map(lambda i: [i])
        | st.characters(exclude_categories=["Cs"]).map(lambda c: list(c.encode())),
        max_size=12,
    ),
    st.booleans(),
)
def test_pieces_are_what_the_library_decodes(parts: list[list[int]], skip: bool) -> None:
    ids = [i for part in parts for i in part]
    assert is_utf8(ids)
    expected = pieces()._backend.decode(ids, skip_special_tokens=skip)
    assert pieces().decode(ids, skip_special_tokens=skip) == expected


@given(
    ids=st.lists(st.integers(0, 255 + len(WORDS)), max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
    skip=st.booleans(),
    follows=st.booleans(),
)
def test_streamed_pieces_are_the_text(
    ids: list[int], cuts: list[int], skip: bool, follows: bool
) -> None:
    tokenizer = pieces()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, follows_text=follows)
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    text = "".join(detokenizer.push(ids[a:b]) for a, b in pairwise(borders))
    assert text + detokenizer.finish() == tokenizer.decode(ids, skip, follows)


def test_a_stop_string_is_compared_with_the_text_that_is_sent() -> None:
    detokenizer = Detokenizer(pieces(), [" Paris"])
    assert detokenizer.push(piece_ids("▁Paris", "a", "▁Paris", "a")) == "Parisa"
    detokenizer = Detokenizer(pieces(), [" Paris"], follows_text=True)
    assert detokenizer.push(piece_ids("▁Paris", "a")) == ""


# --- loading --------------------------------------------------------------------------------------


def test_load_reads_ids_size_and_template(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        config={"eos_token_id": 257, "vocab_size": 300},
        tokenizer_config={"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}!"},
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (257,)
    assert tokenizer.vocab_size == 300  # the embedding has more rows than there are tokens
    assert tokenizer.decode([65, 299]) == "A"
    assert tokenizer.encode_chat(HELLO) == [256, ord("!")]


def test_generation_config_and_template_file_go_first(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        config={"eos_token_id": 257},
        generation_config={"eos_token_id": [257, 256]},
        tokenizer_config={"chat_template": "old"},
    )
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (257, 256)
    assert tokenizer.render_chat(HELLO) == "new"


@pytest.mark.parametrize(
    ("generation", "model", "named", "expected"),
    [
        ({"eos_token_id": [256, 257]}, {"eos_token_id": 65}, {}, (256, 257)),
        ({}, {"eos_token_id": [257, 256]}, {}, (257, 256)),
        ({"eos_token_id": None}, {"eos_token_id": 257}, {}, (257,)),
        ({}, {"eos_token_id": 65}, {"eos_token": "</s>"}, (65, 257)),
        ({}, {}, {"eos_token": {"content": "</s>"}}, (257,)),
        ({}, {}, {"eos_token": "<unheard of>"}, ()),
        ({}, {"eos_token_id": [256, 300, -1], "vocab_size": 257}, {"eos_token": "</s>"}, (256,)),
        ({}, {}, {}, ()),
    ],
)
def test_every_end_is_taken(
    tmp_path: Path, generation: object, model: object, named: object, expected: tuple[int, ...]
) -> None:
    write_model(tmp_path, generation_config=generation, config=model, tokenizer_config=named)
    assert Tokenizer.load(tmp_path).eos_ids == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [256, 65]),  # as tokenizer.json has it
        ({"add_bos_token": True}, [256, 65]),
        ({"add_bos_token": False}, [65]),
        ({"add_eos_token": True}, [65, 257]),
        ({"add_bos_token": True, "add_eos_token": True}, [256, 65, 257]),
        ({"add_bos_token": None}, [256, 65]),
        ({"add_bos_token": True, "bos_token": None}, [65]),
        ({"add_bos_token": True, "eos_token": "<s>", "add_eos_token": True}, [256, 65, 256]),
    ],
)
def test_flags_decide_what_is_put_around(
    tmp_path: Path, settings: dict[str, object], expected: list[int]
) -> None:
    write_model(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"} | settings)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("A") == expected
    assert tokenizer.encode("A", add_special_tokens=False) == [65]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ("s", "s"),
    ],
)
def test_the_default_template_is_taken(tmp_path: Path, template: object, expected: str) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, tokenizer_config={"chat_template": template}))
    assert tokenizer.render_chat(HELLO) == expected


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, tokenizer_config={"chat_template": 5})
    with pytest.raises(TokenizerError, match="neither a text nor a list"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, tokenizer_config={}, config={"eos_token_id": "</s>"})
    with pytest.raises(TokenizerError, match="eos_token_id is '</s>', not ids"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, config=[1])
    with pytest.raises(TokenizerError, match="no JSON object"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, config={})
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(TokenizerError, match="chat template, line 2"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.Metaspace(), "decoder Metaspace is not supported; supported: ByteLevel"),
        (None, "decoder None"),
        (
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
            "ByteFallback, Fuse is not",
        ),
        (
            decoders.Sequence(
                [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]
            ),
            "Replace, ByteFallback, Fuse is not",
        ),
        (
            decoders.Sequence([*PIECE_STEPS, decoders.Strip(" ", 2, 0)]),
            "Fuse, Strip is not",
        ),
    ],
)
def test_tokens_that_are_not_bytes_are_refused(
    tmp_path: Path, decoder: decoders.Decoder | None, named: str
) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=named):
        Tokenizer.load(tmp_path)


def test_a_model_without_a_template_serves_no_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path))
    assert tokenizer.eos_ids == ()
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.encode_chat(HELLO)


def test_one_tokenizer_serves_many_threads() -> None:
    texts = ["x" * n + "é😀" for n in range(200)]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(t for t in texts if TOKENIZER.decode(TOKENIZER.encode(t)) != t)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- chat template --------------------------------------------------------------------------------


def test_blocks_leave_no_blank_lines() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}|\n  {% endif %}\n{% endfor %}\n"
    )
    assert render(source) == "Hello|\n"


def test_templates_have_what_transformers_gives_them() -> None:
    assert render("{{ bos_token }}{{ tools is none }}{{ documents is none }}") == "<s>TrueTrue"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'
    assert render(
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render("{{ strftime_now('%Y') }}").isdigit()
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "a21"
    assert render("{{ thinking }}{{ bos_token }}", thinking=False, bos_token="!") == "False!"


def test_arguments_cannot_replace_the_messages() -> None:
    assert TOKENIZER.render_chat(HELLO, messages=[]) == "user: Hello\nassistant: "
    assert TOKENIZER.render_chat(HELLO, add_generation_prompt=False) == "user: Hello\n"


def test_content_parts_are_joined_and_none_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert render("{{ messages[0].content }}", [message]) == "a\nb"
    assert message["content"] is parts  # the caller's message is as it was
    assert (
        render("{{ messages[0].content + '!' }}", [{"role": "assistant", "content": None}]) == "!"
    )
    assert render("{{ messages[0].content + '!' }}", [{"role": "assistant"}]) == "!"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "type 'image_url'"),
        ([{"type": "text"}], "needs a string"),
        (["text"], "must be an object"),
        (5, "string or a list"),
    ],
)
def test_other_content_is_refused(content: object, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render("{{ messages[0].content }}", [{"role": "user", "content": content}])


def test_refusals_carry_the_templates_reason() -> None:
    with pytest.raises(TemplateError, match="^Roles must alternate$"):
        render("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(TemplateError, match="undefined"):
        render("{{ missing.attribute }}")
    with pytest.raises(TemplateError, match="fails on these messages"):
        render("{{ 'a' + 1 }}")
    with pytest.raises(TemplateError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TemplateError, match="unsafe"):
        render("{{ messages.append(1) }}")
