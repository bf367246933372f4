"""Turns a plan into tensors, runs the model on it, and samples. Owns weights and KV memory."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvtransfer.region import Region
from services.engine.attention import batch_order
from services.engine.kernels import use_threads
from services.engine.model import Model
from services.engine.sampler import sample
from services.engine.scheduler import NO_TOKEN, Plan


class ModelRunner:
    """The :class:`~services.engine.engine.Runner` over a real model and one worker's KV region."""

    def __init__(self, model: Model, region: Region, epoch: int, checksums: bool = False) -> None:
        self.model = model
        self.region = region
        self.epoch = epoch
        self.checksums = checksums
        self.pause: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[int]:
        """One token per row, -1 where the row does not sample.

        ``pause`` is called a few times meanwhile, on a CPU. It may hand out blocks and take some
        back, but none of the plan's.
        """
        use_threads(torch.get_num_threads())
        self.publish(plan.opened, [])
        self.zero(plan.spoiled)
        device = self.region.spans.device
        order = batch_order(plan.rows)
        rows = [plan.rows[i] for i in order]
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []  # of the rows that sample, among the step's tokens
        for row in rows:
            ids += row.ids
            positions += range(row.start, row.end)
            if row.sample:
                last.append(len(ids) - 1)
        hidden = self.model.forward(
            _indices(ids, device),
            _indices(positions, device),
            self.region.kv,
            self.model.plan(rows, self.region.layout.block_size),
            self.pause,
        )
        tokens = [NO_TOKEN] * len(rows)
        if last:
            if len(last) < len(ids):
                hidden = hidden[_indices(last, device)]
            chosen = sample(self.model.logits(hidden), [row for row in rows if row.sample])
            places = (index for index in order if plan.rows[index].sample)
            for index, token in zip(places, chosen, strict=True):
                tokens[index] = token
        return tokens

    def zero(self, blocks: list[int]) -> None:
        """See :class:`~services.engine.engine.Runner`."""
        for block in blocks:
            self.region.spans[block].zero_()
        if blocks:
            self._wait()  # a pull may write to them next

    def publish(self, opened: tuple[tuple[int, int], ...], sealed: list[tuple[int, int]]) -> None:
        """Make block generations visible to peers: opened before, sealed after their writes."""
        if opened:
            self.region.open(self.epoch, opened)
        if sealed:
            self.region.seal(self.epoch, sealed, self.checksums)
            # Whoever hears of these blocks next may let a peer read them: their writes must be over
            # then, and in a step that samples nothing no one has waited for them yet.
            self._wait()

    def _wait(self) -> None:
        """Peers read and write this memory without regard for a device's queue."""
        device = self.region.spans.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _indices(values: list[int], device: torch.device) -> Tensor:
    """By numpy, which reads a list in a third of the time."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
