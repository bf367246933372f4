"""``baton doctor``: looks at the machine or pod it runs in, and says what to mend.

``findings`` is what a check returns, ``command`` runs all of them. ``host``, ``devices`` and
``software`` look; ``trial`` moves real KV blocks between two processes, over each of ``ways``.
"""
