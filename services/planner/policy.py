"""What a Serve config names as autoscaling policy: a door to :mod:`services.planner.autoscaler`.

Serve pickles the module of a policy by value, once for each deployment: nothing that is to be one
thing in the controller's process, as the planner that two pools share, may be in it.
"""

from typing import Any


class Autoscaler:
    """Takes and gives what ``services.planner.autoscaler.Autoscaler`` does."""

    def __init__(self, **told: Any) -> None:
        from services.planner import autoscaler

        self._policy = autoscaler.Autoscaler(**told)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas."""
        return self._policy(context)
