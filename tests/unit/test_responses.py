"""Responses as they leave the router."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from router.responses import one_request_id

KIND = (b"content-type", b"application/json")
OURS, THEIRS = (b"x-request-id", b"ours"), (b"X-Request-ID", b"theirs")

Headers = list[tuple[bytes, bytes]]


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ([OURS, KIND, THEIRS], [KIND, OURS]),
        ([KIND, THEIRS], [KIND, THEIRS]),
        ([KIND], [KIND]),
        ([OURS, OURS], [OURS]),
    ],
)
def test_the_first_request_id_is_the_only_one(headers: Headers, left: Headers) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def scenario() -> None:
        only = one_request_id(send)
        await only({"type": "http.response.start", "status": 200, "headers": headers})
        await only({"type": "http.response.body", "body": b"{}"})

    asyncio.run(scenario())
    assert sent == [
        {"type": "http.response.start", "status": 200, "headers": left},
        {"type": "http.response.body", "body": b"{}"},
    ]
