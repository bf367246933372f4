"""``baton local`` that observes, or does not: both sides of ``make bench-observability``.

``python tests/support/switched_baton.py serve FLAGS`` is ``baton local FLAGS``. After SIGUSR1 the
methods by which ``router.recorder``, ``router.marks`` and ``services.tallies`` make notes for
metrics, console and traces do nothing; after SIGUSR2 they do again. It is one server all the same:
two of them differ by more than that costs, since their memory lies elsewhere. To be switched while
nothing runs.
"""

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, str(Path(__file__).resolve()), "serve")
OFF, ON = signal.SIGUSR1, signal.SIGUSR2


class Switch:
    """Whether notes are made."""

    on = True


def switched(method: Callable[..., Any]) -> Callable[..., Any]:
    """It does nothing while that is off."""

    @functools.wraps(method)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if Switch.on else None

    return maybe


def install() -> None:
    """Before any server is made."""
    from router.marks import Marks
    from router.observe import Requests
    from router.recorder import RequestRecorder
    from services.tallies import WorkerTallies

    for names, cls in (
        ("began reserved sent first handed pulled next replaced failed refused", Marks),
        ("read tokenized wrote failed", RequestRecorder),
        ("on_turn on_prompt on_pull", WorkerTallies),
    ):
        for name in names.split():
            setattr(cls, name, switched(getattr(cls, name)))
    end = Requests.end

    def forget(self: Requests, recorder: RequestRecorder) -> None:
        if Switch.on:
            end(self, recorder)
        else:
            del self._open[recorder]

    Requests.end = forget  # type: ignore[method-assign]

    def turn(number: int, frame: Any) -> None:
        Switch.on = number == ON

    for number in (OFF, ON):
        signal.signal(number, turn)


def main() -> int:
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from services import cli

    assert sys.argv[1] == "serve"
    install()
    return cli.main(["local", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
