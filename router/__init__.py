"""The front door: HTTP and text in, token ids to a pair of workers, text out.

A request's path: ``api`` (HTTP) → ``openai_api`` (fields) → ``tokenizer`` (text to ids) →
``dispatch`` (``door``, ``admission``, ``pending``, ``policy``; then reserve, prefill, decode,
release) → ``completion`` (ids to text) → ``sse``. ``wire`` holds every message that router and
workers exchange, in the order of the conversation; ``link`` carries them, ``workers`` knows who is
there, ``pools`` who should be, ``proof`` tries each pair before it gets traffic. The router owns
requests; workers own blocks.

What a request sees on its way: ``observe`` wraps it, ``recorder`` and ``marks`` note its moments,
``observation`` says what they mean, ``ledger`` counts, ``metrics`` exports.
"""
