"""The servers of a comparison: all up, and paused when it is not their turn, or started for each.

A ``baton serve`` that does nothing still takes 0.18 of a core for its own and Ray's housekeeping,
and holds 6 GB (one prefill and one decode worker of the default model: CPU times and proportional
set sizes of its 17 processes, over 20 s). So those that wait are stopped by SIGSTOP and cost memory
only; woken after 30, 90 and 480 s, they answered within 0.6 s, with the same processes.

Starting one takes 40 to 50 s on a busy machine: that is done for each turn only when it is asked
for, or when the memory does not hold all. A server that ended by itself is reported and not started
again; the others go on.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from loadtest.targets import Server, Target, TargetError, start

MEMORY_MARGIN = 1.25  # of what the biggest one so far has taken: it grows under load
CGROUP = Path("/sys/fs/cgroup")

Prepare = Callable[[Server], Awaitable[None]]
"""What is to be done with a server that has just become ready: warm it up."""


class Fleet:
    """Gives out each target's server, starts and stops those that are managed."""

    def __init__(
        self,
        targets: Sequence[Target],
        folder: Path,
        prepare: Prepare,
        say: Callable[[str], None],
        restart: bool = False,
        command: Sequence[str] | None = None,
    ) -> None:
        self.targets = tuple(targets)
        self.restart = restart
        self.notes: list[str] = []  # what a report has to say of them
        self._folder, self._prepare, self._say = folder, prepare, say
        self._command = command
        self._up: dict[str, Server] = {}
        self._dead: set[str] = set()
        self._biggest = 0

    async def open(self) -> None:
        """Start those that stay up, one after the other. Raises TargetError if one does not."""
        for target in self.targets:
            managed_up = sum(server.target.managed for server in self._up.values())
            if self.restart and managed_up:
                continue
            if target.managed and managed_up and not self._fits():
                self.restart = True
                self._note(
                    f"{target.name} does not fit into the memory beside the others"
                    f" ({memory_available() / 2**30:.1f} GiB left, one took"
                    f" {self._biggest / 2**30:.1f}): each is started anew for its turn"
                )
                continue
            await self._start(target)

    async def turn(self, target: Target) -> Server | None:
        """The target's server, ready; None once it has died, which is reported the first time."""
        if target.name in self._dead:
            return None
        if self.restart and target.managed and target.name not in self._up:
            await self._stop_managed()
            try:
                await self._start(target)
            except TargetError as error:
                self._bury(target, str(error))
        server = self._up.get(target.name)
        if server is None or self.check(server):
            return None
        for other in self._up.values():
            if other is not server:
                other.pause()
        server.resume()
        return server

    def check(self, server: Server) -> bool:
        """Whether the server has ended by itself; if so, it is reported with the end of its log."""
        if not (how := server.died):
            return False
        if server.target.name not in self._dead:
            self._bury(
                server.target,
                f"{server.target.name} {how} during the comparison, which goes on without it; the"
                f" end of {server.log}:\n{server.tail()}",
            )
        return True

    @property
    def alive(self) -> tuple[Target, ...]:
        """Targets that are not known to be dead."""
        return tuple(target for target in self.targets if target.name not in self._dead)

    async def close(self) -> None:
        """Stop all that was started here."""
        await self._stop_managed()
        self._up.clear()

    async def _start(self, target: Target) -> None:
        if target.managed:
            self._say(f"{target.name}: starting {target.what}")
        server = await start(target, self._folder, self._command)
        self._up[target.name] = server
        if target.managed:
            self._say(f"{target.name}: ready in {server.ready_s:.1f} s at {server.url}")
        await self._prepare(server)
        self._biggest = max(self._biggest, server.memory_bytes())
        server.pause()

    async def _stop_managed(self) -> None:
        for name, server in list(self._up.items()):
            if server.target.managed:
                await server.stop()
                del self._up[name]

    def _fits(self) -> bool:
        available = memory_available()
        return not available or available > self._biggest * MEMORY_MARGIN

    def _bury(self, target: Target, note: str) -> None:
        self._dead.add(target.name)
        self._note(note)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)


def memory_available() -> int:
    """Bytes that new processes may take, by the machine or its container; 0 if not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    found = int(kib) * 1024
    try:
        limit, used = (
            (CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current")
        )
        return found if limit == "max" else min(found, int(limit) - int(used))
    except (OSError, ValueError):
        return found
