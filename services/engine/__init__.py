"""Ids and blocks to ids: no network, no text.

``engine.step()`` is schedule (``scheduler``, ``blocks``) → run (``runner``, ``model``,
``attention``, ``sampler``) → update. The first half is plain Python over ints, the second is torch.
"""
