"""From a request of the OpenAI API to the answers that have to be made for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b

from router import openai_api
from router.completion import Choice, Reply
from router.job import GenRequest
from router.openai_api import ChatRequest, GenerationFields
from router.recorder import ChoiceWatch
from router.tokenizer import Detokenizer, Tokenizer


def make_choices(
    request: GenerationFields,
    prompts: Sequence[list[int]],
    request_id: str,
    tokenizer: Tokenizer,
    trace: str = "",
) -> list[Choice]:
    """``n`` answers to each of the prompts; choice i answers prompt i // n.

    ``trace``: traceparent of the request's span, if it is traced.
    """
    n = request.n or 1
    seed = int.from_bytes(os.urandom(8), "big") if request.seed is None else request.seed
    salt = b""
    if request.cache_salt is not None:
        salt = blake2b(request.cache_salt.encode(), digest_size=16).digest()
    include_stop = bool(request.include_stop_str_in_output)
    choices = []
    for index in range(len(prompts) * n):
        sampling = openai_api.sampling(request, seed, index % n, tokenizer.eos_ids)
        detokenizer = Detokenizer(
            tokenizer,
            request.stop_strings,
            include_stop,
            request.skip_special_tokens is not False,
            request.min_tokens or 0,
            follows_text=not isinstance(request, ChatRequest),
        )
        generation = GenRequest(
            tuple(prompts[index // n]), sampling, request.limit, salt, request_id, trace
        )
        choices.append(
            Choice(index, generation, detokenizer, include_stop, eos_ids=tokenizer.eos_ids)
        )
    return choices


def watches(reply: Reply) -> list[ChoiceWatch]:
    """What is observed of the answers; a prompt counts with the first of its answers."""
    return [
        ChoiceWatch(
            0 if choice.index % reply.n else len(choice.request.ids), choice.ids, choice.marks
        )
        for choice in reply.choices
    ]
