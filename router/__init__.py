"""The front door: HTTP and text in, token ids to a pair of workers, text out.

A request's path: ``api`` (HTTP) → ``tokenizer`` (text to ids) → ``dispatch`` (admit, choose a
pair, reserve, prefill, decode, release) → ``tokenizer`` (ids to text) → ``api`` (SSE). ``wire``
holds every message that router and workers exchange, in the order of the conversation. The router
owns requests; workers own blocks.
"""
