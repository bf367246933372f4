"""What a worker still holds, for tests that want it to hold nothing."""

from services.worker import Worker


def worker_leftovers(worker: Worker) -> list[str]:
    """What is not idle in a worker of this process; may be called from any thread."""
    engine, roles = worker.engine, worker.roles
    left = []
    if roles.num_open:
        left.append(f"{roles.num_open} requests and tickets")
    if engine.scheduler.running or engine.scheduler.waiting:
        running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
        left.append(f"{running} running, {waiting} waiting")
    try:
        counts = engine.pool.counts()
    except RuntimeError:  # it changed while it was being counted
        return [*left, "blocks on the move"]
    held = {kind: counts[kind] for kind in ("active", "leased", "quarantined") if counts[kind]}
    return [*left, f"blocks {held}"] if held else left
