"""``baton local`` that observes nothing: the other side of ``make bench-observability``.

``python tests/support/unwatched_baton.py serve FLAGS`` is ``baton local FLAGS`` without what
``router.recorder``, ``router.marks``, ``services.tallies`` and ``router.loop_lag`` do for metrics,
console and traces: their methods are replaced by ones that do nothing. Its /metrics says 0.
"""

import sys
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, str(Path(__file__).resolve()), "serve")


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Whatever it was, it is not noted."""


def observe_nothing() -> None:
    """Before any server is made."""
    from router.loop_lag import LoopLag
    from router.marks import Marks
    from router.observe import Requests
    from router.recorder import RequestRecorder
    from services.tallies import WorkerTallies

    notes = ("began reserved sent first handed pulled next replaced failed refused", Marks)
    steps = ("read tokenized wrote failed", RequestRecorder)
    tallies = ("on_turn on_prompt on_pull", WorkerTallies)
    for names, cls in (notes, steps, tallies, ("start", LoopLag)):
        for name in names.split():
            assert callable(getattr(cls, name)), f"{cls.__name__}.{name} is called otherwise now"
            setattr(cls, name, nothing)
    Requests.end = lambda self, recorder: self._open.pop(recorder)  # type: ignore[method-assign]


def main() -> int:
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from services import cli

    assert sys.argv[1] == "serve"
    observe_nothing()
    return cli.main(["local", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
