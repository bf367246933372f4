"""Moves KV blocks from one worker's pool to another's. Knows blocks, never prompts or requests.

The hand-off, from the producer P to the consumer D:

1. D reserves blocks, then P prefills and *seals* its blocks (:mod:`kvtransfer.region`).
2. P exports them under a lease (:class:`~kvtransfer.exporter.Exporter`) and signs a
   :class:`~kvtransfer.ticket.Ticket`.
3. D pulls the spans that its prefix cache lacks, then the seals, over a
   :class:`~kvtransfer.transport.Transport`.
4. D compares every trailer and seal with the ticket (:class:`~kvtransfer.importer.Importer`): the
   right block, not reused meanwhile. Only then are the blocks used.
5. P frees them on release, or when the lease runs out.
"""
