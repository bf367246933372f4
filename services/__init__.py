"""The processes: ``app`` (Ray Serve: router and workers), ``registry`` (named actor), ``local``
(all in one process).

``worker`` is what runs in a worker process: an engine thread (``engine_loop``), the two roles
(``prefill``,
``decode``) and the TCP endpoint that routers connect to.
"""
