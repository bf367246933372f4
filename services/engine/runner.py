"""Turns a plan into tensors, runs the model on it, and samples. Owns weights and KV memory."""

import torch

from kvtransfer.region import Region
from services.engine.attention import batch_order
from services.engine.kernels import use_threads
from services.engine.model import Model
from services.engine.sampler import sample
from services.engine.scheduler import Plan


class ModelRunner:
    """The :class:`~services.engine.engine.Runner` over a real model and one worker's KV region."""

    def __init__(self, model: Model, region: Region, epoch: int, checksums: bool = False) -> None:
        self.model = model
        self.region = region
        self.epoch = epoch
        self.checksums = checksums

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[int]:
        """One token per row, -1 where the row does not sample."""
        use_threads(torch.get_num_threads())
        self.publish(plan.opened, [])
        self.zero(plan.spoiled)
        device = self.region.spans.device
        order = batch_order(plan.rows)
        rows = [plan.rows[i] for i in order]
        ids = torch.tensor([token for row in rows for token in row.ids], device=device)
        positions = torch.tensor(
            [p for row in rows for p in range(row.start, row.end)], device=device
        )
        attention = self.model.plan(rows, self.region.layout.block_size)
        hidden = self.model.forward(ids, positions, self.region.kv, attention)
        tokens = [-1] * len(rows)
        last, sampling = [], []
        end = 0
        for index, row in zip(order, rows, strict=True):
            end += len(row.ids)
            if row.sample:
                last.append(end - 1)
                sampling.append((index, row))
        if sampling:
            logits = self.model.logits(hidden[torch.tensor(last, device=device)])
            for (index, _), token in zip(
                sampling, sample(logits, [row for _, row in sampling]), strict=True
            ):
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
        self.region.open(self.epoch, opened)
        self.region.seal(self.epoch, sealed, self.checksums)
        if sealed:
            # Whoever hears of these blocks next may let a peer read them: their writes must be over
            # then, and in a step that samples nothing no one has waited for them yet.
            self._wait()

    def _wait(self) -> None:
        """Peers read and write this memory without regard for a device's queue."""
        device = self.region.spans.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
