"""The exception tree of this package.

::

    RouterError
    ├── LinkError             a connection to a worker could not be made
    └── RequestError          a request ends here; carries what the client is told
        ├── BadRequest        400: the client's mistake
        ├── Unauthorized      401
        ├── NotFound          404
        ├── TooLarge          413
        ├── QueueFull         429: come back later
        ├── Unavailable       503: nothing can serve this now, come back later
        ├── DeadlineExceeded  504
        ├── ClientGone        499, for logs
        └── InternalError     500: our mistake, or a worker's
"""

from __future__ import annotations

import logging
from typing import Any, Self

log = logging.getLogger(__name__)


class RouterError(Exception):
    """Base of all errors raised by the router."""


class LinkError(RouterError):
    """A connection to a worker could not be made; the message says why."""


class RequestError(RouterError):
    """A request ends with this error. ``body()`` is the OpenAI error object."""

    status = 500
    kind = "InternalServerError"
    retry_after_s: int | None = None
    rejection = ""  # why it was not let in, as it is counted: see router.observation

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        # Parts may come from the client; a lone surrogate in them could not be sent back.
        self.message = message.encode("utf-8", "replace").decode()
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """``{"error": ...}``; the code is the HTTP status, as clients' retry code expects."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code or self.status,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that tell the client whether to try again."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(self.retry_after_s)}

    def rejects(self, reason: str) -> Self:
        """The same error, counted as a rejection."""
        self.rejection = reason
        return self


class BadRequest(RequestError):
    """The client's mistake; ``param`` names the field."""

    status = 400
    kind = "BadRequestError"


class Unauthorized(RequestError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class NotFound(RequestError):
    """No such model or path."""

    status = 404
    kind = "NotFoundError"


class TooLarge(RequestError):
    """The body is larger than the server reads."""

    status = 413
    kind = "BadRequestError"


class QueueFull(RequestError):
    """Too many requests wait already."""

    status = 429
    kind = "RateLimitError"
    retry_after_s = 1


class Unavailable(RequestError):
    """Nothing can serve this now; trying again makes sense."""

    status = 503
    kind = "ServiceUnavailableError"
    retry_after_s = 1


class DeadlineExceeded(RequestError):
    """The request's time was over before it was answered."""

    status = 504
    kind = "GatewayTimeoutError"


class ClientGone(RequestError):
    """The client has closed its connection; nobody reads this. The status is for logs."""

    status = 499
    kind = "ClientGone"


class InternalError(RequestError):
    """Our mistake, or a worker's."""


def as_request_error(error: BaseException) -> RequestError:
    """What the client is told about any error; those that nobody expected are logged."""
    if isinstance(error, RequestError):
        return error
    log.error("a request failed in the router", exc_info=error)
    return InternalError("the server made a mistake; its log says more")
