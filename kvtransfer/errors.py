"""The exception tree of this package.

::

    KVTransferError
    ├── LayoutMismatch      two workers whose KV cannot be exchanged
    ├── TicketError         a ticket that is malformed, forged or not meant for this deployment
    └── TransportError      the transport cannot do what was asked (also: it is not usable here)
        └── PeerGone        the peer's process or agent is no longer there
"""


class KVTransferError(Exception):
    """Base of all errors raised by kvtransfer."""


class LayoutMismatch(KVTransferError):
    """The KV of two workers differs in identity or form."""


class TicketError(KVTransferError):
    """A ticket did not parse, or its signature does not match."""


class TransportError(KVTransferError):
    """A transport could not be set up or could not start a transfer."""


class PeerGone(TransportError):
    """The remote worker has gone; nothing that it held can be pulled any more."""
