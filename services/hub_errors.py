"""What can go wrong between here and a hub, said so that the user can act on it.

huggingface_hub, the HTTP client below it and the operating system each raise errors of their own;
:func:`explained` turns them into a :class:`FetchError` that says what is wrong and what to do, or
into :class:`Unreachable`, for which the cache may be a way out. No token gets into any of them.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from services.model_cache import FetchError

if TYPE_CHECKING:
    from services.hub_id import HubModel

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Unreachable(FetchError):
    """The hub does not answer, or must not be asked; the message says which."""

    def without_cache(self, model: "HubModel", cache: Path) -> FetchError:
        """The error when the cache has no answer either."""
        return FetchError(
            f"{model} is neither here nor in the cache {cache}, and {self}; fetch it where there is"
            f" a network, with `baton fetch {model}`, and copy the cache, or give the path of a"
            " folder or .gguf file"
        )


@contextmanager
def explained(model: "HubModel", cache: Path, downloading: str = "") -> Iterator[None]:
    """Turn what goes wrong inside into :class:`FetchError`; ``downloading`` is the file if any."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as error:
        raise _answered(model, error) from error
    except OfflineModeIsEnabled as error:
        raise _offline(model, downloading) from error
    except httpx2.HTTPError as error:
        raise _lost(error, downloading) from error
    except OSError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _answered(model, error.__cause__) from error
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            raise _offline(model, downloading) from error
        if isinstance(error.__cause__, httpx2.HTTPError):
            raise _lost(error.__cause__, downloading) from error
        if error.errno in NO_SPACE:
            raise FetchError(
                f"{cache}: no space left on its disk; make room, or set HF_HOME to a folder on"
                f" another one, and run the command again: {KEPT}"
            ) from error
        if error.errno is not None:  # a file of ours: named by who calls us
            raise
        raise FetchError(f"cannot download {downloading or model}: {first_line(error)}") from error
    except (RuntimeError, ValueError) as error:  # hf_xet's, and ids that the library refuses
        raise FetchError(f"cannot fetch {model}: {first_line(error)}") from error


KEPT = "the files that are complete are kept"


def _offline(model: "HubModel", downloading: str) -> FetchError:
    missing = f", and {downloading} of {model} is not in the cache" if downloading else ""
    return Unreachable(f"HF_HUB_OFFLINE is set, so the hub is not asked{missing}")


def _lost(error: Exception, downloading: str) -> FetchError:
    from huggingface_hub import constants

    reason = first_line(error) or type(error).__name__
    if downloading:
        return Unreachable(
            f"the download of {downloading} from {constants.ENDPOINT} stopped ({reason}); run the"
            f" command again: {KEPT}"
        )
    return Unreachable(f"the hub at {constants.ENDPOINT} cannot be reached ({reason})")


def _answered(model: "HubModel", error: Exception) -> FetchError:
    """For an HTTP status that is an error."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    assert isinstance(error, HfHubHTTPError)
    page, status = f"{constants.ENDPOINT}/{model.repo}", error.response.status_code
    has_token = get_token() is not None
    if isinstance(error, GatedRepoError):
        if has_token:
            return FetchError(
                f"{model.repo} is gated, and the account of the token (HF_TOKEN) has no access:"
                f" ask for it at {page}"
            )
        return FetchError(
            f"{model.repo} is gated: accept its terms at {page}, then set HF_TOKEN to a token of"
            " that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return FetchError(f"{model.repo} has no revision {model.revision!r}; see {page}/commits")
    if isinstance(error, RepositoryNotFoundError):
        private = "the token (HF_TOKEN) has no access to it" if has_token else "it needs HF_TOKEN"
        return FetchError(
            f"unknown model {model.repo!r}: there is no such folder here, and no such model at"
            f" {constants.ENDPOINT}, unless it is private and {private}"
        )
    if status == 401:
        return FetchError(f"{constants.ENDPOINT} refuses the token (HF_TOKEN): it is not valid")
    if status == 403:
        return FetchError(f"{page}: the token (HF_TOKEN) does not permit to read it")
    if status == 429:
        wait = error.response.headers.get("Retry-After", "")
        return FetchError(
            f"{constants.ENDPOINT} limits how often it is asked; try again"
            f"{f' in {wait} s' if wait else ' later'}, or set HF_TOKEN, which has a higher limit"
        )
    if status >= 500:
        return Unreachable(f"the hub at {constants.ENDPOINT} is out of order (HTTP {status})")
    return FetchError(f"{error.request.url.copy_with(query=None)}: HTTP {status}")


def first_line(error: Exception) -> str:
    """What an error says, without the paragraphs that follow."""
    return str(error).strip().partition("\n")[0]
