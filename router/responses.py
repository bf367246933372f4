"""Answers as HTTP responses, errors as the OpenAI API writes them, query strings (Starlette)."""

from __future__ import annotations

import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import openai_api
from router.errors import BadRequest, RequestError, as_request_error
from router.observe import note_failure

REQUEST_ID = b"x-request-id"
RETRY_SOON = {"retry-after": "1"}


class AsgiResponse(Response):
    """A response that is an ASGI application itself."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        await self._app(scope, receive, send)


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as the whole response."""
    return JSONResponse(error.body(), error.status, {**(headers or {}), **error.headers()})


def ready_response(ready: bool, asleep: bool) -> JSONResponse:
    """Of ``GET /ready``: a router that can wake workers up takes requests as well."""
    if asleep:
        return JSONResponse({"ready": True, "asleep": True})
    return JSONResponse({"ready": ready}, 200 if ready else 503, {} if ready else RETRY_SOON)


def one_request_id(send: Send) -> Send:
    """``send``, without any ``x-request-id`` after a response's first."""

    async def first_only(message: Message) -> None:
        if message["type"] == "http.response.start":
            ids = [one for one in message.get("headers", ()) if one[0].lower() == REQUEST_ID]
            kept = [one for one in message.get("headers", ()) if one[0].lower() != REQUEST_ID]
            message = {**message, "headers": [*kept, *ids[:1]]}
        await send(message)

    return first_only


def query_seconds(http: Request, name: str) -> float | None:
    """A time in the query string, None if it is not there; raises BadRequest if it is none."""
    text = http.query_params.get(name)
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 <= seconds < math.inf:
        raise BadRequest(f"{name}: {text!r:.100} is not a number of seconds", param=name)
    return seconds


# --- handlers of exceptions: who is asked for what becomes of a request that nobody has answered --


async def on_request_error(http: Request, error: Exception) -> Response:
    """What a handler has refused."""
    assert isinstance(error, RequestError)
    note_failure(http.scope, error)
    asked = http.headers.get("x-request-id", "")
    known = openai_api.REQUEST_ID.fullmatch(asked)
    return error_response(error, {"x-request-id": asked} if known else None)


async def on_http_exception(http: Request, error: Exception) -> Response:
    """What the framework refuses by itself: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    answer = RequestError(f"{http.method} {http.url.path:.200}: {error.detail}")
    answer.status = error.status_code
    answer.kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    note_failure(http.scope, answer)
    return error_response(answer, dict(error.headers or {}))


async def on_exception(http: Request, error: Exception) -> Response:
    """Our mistake. It is raised further as well, for the server's log."""
    return error_response(as_request_error(error))
