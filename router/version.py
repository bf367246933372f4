"""Which version this is."""

from importlib.metadata import PackageNotFoundError, version as installed


def version() -> str:
    """Of the installed distribution; from a checkout that is not installed, "unknown"."""
    try:
        return installed("baton-serving")
    except PackageNotFoundError:
        return "unknown"
