"""API keys as the router knows them: by digest, and from a file that may change (no network)."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

LOOK_S = 5.0  # between two looks at a file of keys, while requests come

log = logging.getLogger(__name__)


class KeyFileError(ValueError):
    """A file of keys that cannot be used; the message says why."""


def read_keys(file: Path) -> tuple[str, ...]:
    """The keys in a file, one per line. Raises KeyFileError, also if there is none: an empty file
    must not open the door to everybody.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(getattr(error, "strerror", None) or str(error)) from error
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys:
        raise KeyFileError("holds no key")
    return keys


class Keys:
    """Those of the configuration, and those of a file, which is read again when it has changed.

    A secret in a pod changes while the router runs. While the file cannot be read or holds no key,
    the last ones hold: neither is everybody let in nor everybody kept out.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises KeyFileError."""
        self._given = digests(keys)
        self._file = Path(file) if file else None
        self._clock = clock
        self._look_at = clock() + LOOK_S
        self._seen = stamp(self._file) if self._file else ()
        self._read = digests(read_keys(self._file)) if self._file else []

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._given or self._file)

    def known(self, key: bytes) -> bool:
        """Whether this is one of them; takes as long for each."""
        self._look()
        digest = sha256(key).digest()
        known = [hmac.compare_digest(digest, one) for one in (*self._given, *self._read)]
        return any(known)

    def _look(self) -> None:
        if self._file is None or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_S
        seen = stamp(self._file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._read = digests(read_keys(self._file))
        except KeyFileError as error:
            log.warning("%s: %s; the keys that were in it still hold", self._file, error)
        else:
            log.info("%s has changed: keys of clients are read again", self._file)


def stamp(file: Path) -> tuple[int, ...]:
    """What differs when a file was written or replaced; empty if it is not there."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def digests(keys: Iterable[str]) -> list[bytes]:
    """Equally long, whatever the keys are."""
    return [sha256(key.encode()).digest() for key in keys]
