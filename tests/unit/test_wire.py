"""The codec of router and workers: everything comes back equal, everything else is refused."""

from __future__ import annotations

import dataclasses
import typing

import msgpack
import pytest
from hypothesis import given, strategies as st

from kvtransfer.ticket import AgentCard
from router import wire

AGENT = AgentCard("P", 2**64 - 1, b"f" * 16, 64, "nixl", b"\x00\xff")
CARD = wire.WorkerCard(
    "P", 7, "prefill", "m", "h", 1, 2, {"num_layers": 2}, (AGENT,), 64, 16, 512, 8, 256
)
LOAD = wire.Load(
    "ready", "nixl", 1, 2, 3, 4, {"free": 5}, 6, 7, 8, 9, 10, 11, 12, 13, expired_leases=14
)
VALUES = {
    "int": st.integers(0, 2**64 - 1),
    "str": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False),
    "Sampling": st.builds(wire.Sampling, max_tokens=st.integers(0, 9), stop_ids=st.just((1, 2))),
    "WorkerCard": st.just(CARD),
    "AgentCard": st.just(AGENT),
    "Mapping[str, int]": st.just({"free": 1}),
    "tuple[int, ...]": st.lists(st.integers(0, 2**32)).map(tuple),
    "tuple[bytes, ...]": st.lists(st.binary(max_size=3)).map(tuple),
}
MESSAGES = typing.get_args(wire.Message)


def any_of(kind: type) -> st.SearchStrategy[typing.Any]:
    fields = dataclasses.fields(kind)
    return st.builds(kind, **{field.name: VALUES[str(field.type)] for field in fields})


@given(st.one_of([any_of(kind) for kind in MESSAGES]))
def test_round_trip(message: wire.Message) -> None:
    frame = wire.encode(message)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert wire.decode(frame[4:]) == message


@given(st.one_of([any_of(kind) for kind in MESSAGES]), st.integers(1, 2**64 - 1))
def test_numbered_frames(message: wire.Message, number: int) -> None:
    body = wire.encode(message, number)[4:]
    assert wire.unpack(body) == (message, number)
    assert wire.decode(body) == message
    assert wire.unpack(wire.encode(message)[4:]) == (message, None)


@given(st.one_of([any_of(kind) for kind in MESSAGES]), st.data())
def test_no_changed_byte_goes_unnoticed(message: wire.Message, data: st.DataObject) -> None:
    body = bytearray(wire.encode(message, 5)[4:])
    index = data.draw(st.integers(0, len(body) - 1))
    body[index] ^= data.draw(st.integers(1, 255))
    try:
        _, number = wire.unpack(bytes(body))
    except wire.WireError:
        return
    assert number is None  # the checksum's own key is gone: the link takes no such frame


def test_every_kind_is_told_apart() -> None:
    assert len({kind.__name__ for kind in MESSAGES}) == len(MESSAGES)


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


def mangled(message: wire.Message, **changes: object) -> bytes:
    raw = msgpack.unpackb(wire.encode(message)[4:])
    for name, value in changes.items():
        if value is None:
            del raw[name]
        else:
            raw[name] = value
    return typing.cast("bytes", msgpack.packb(raw))


def test_unknown_fields_are_ignored_and_defaults_are_not_sent_but_filled() -> None:
    tokens = wire.Tokens(b"r", 1, 0, (5,))
    sent = msgpack.unpackb(wire.encode(tokens)[4:])
    assert sent.keys() == {"t", "request", "attempt", "first_index", "ids"}
    assert wire.decode(mangled(tokens, later=1)) == tokens
    assert wire.decode(mangled(tokens, finish="", queue_ms=0.0)) == tokens  # from who sends them
    whole = wire.Tokens(b"r", 1, 0, (5,), "stop", 3, 1.5, 2.5)
    assert wire.decode(wire.encode(whole)[4:]) == whole


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (wire.Ping(1), {"seq": "1"}),
        (wire.Ping(1), {"seq": True}),
        (wire.Ping(1), {"seq": 1.0}),
        (wire.Ping(1), {"seq": None}),
        (wire.Ping(1), {"t": "Pickle"}),
        (wire.Ping(1), {"t": ["Ping"]}),
        (wire.Tokens(b"r", 1, 0, (5,)), {"ids": 5}),
        (wire.Tokens(b"r", 1, 0, (5,)), {"ids": ["5"]}),
        (wire.Tokens(b"r", 1, 0, (5,)), {"request": "r"}),
        (LOAD, {"blocks": [1]}),
        (wire.Welcome(CARD), {"card": 5}),
        (wire.Welcome(CARD), {"card": {}}),
        (wire.Welcome(CARD), {"card": "text"}),
    ],
)
def test_wrong_types_are_refused(message: wire.Message, changes: dict[str, object]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(mangled(message, **changes))


@pytest.mark.parametrize("body", [5, [], "Ping", None, {"t": "Nested"}, {}])
def test_not_a_message(body: object) -> None:
    with pytest.raises(wire.WireError, match=f"protocol version {wire.PROTOCOL_VERSION}"):
        wire.decode(msgpack.packb(body))
