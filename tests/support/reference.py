"""Is this answer right? Judged by teacher forcing against ``transformers`` on the same GGUF.

Logits differ by up to 8e-5 between batch shapes and thread counts, so two right engines may part
where two tokens are as good as equal. The judge therefore scores every token of an answer given the
answer's own tokens before it: a token is wrong if its score (logit / temperature + noise) is more
than ``TOLERANCE`` below the best; one that is not the best but within it is a tie, and is counted.
"""

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.engine.sampler_reference import gumbel_noise

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Tie:
    """Two tokens that are as good as equal."""

    prompt_tokens: int
    index: int
    token: int
    best: int
    gap: float


@dataclass
class Judge:
    """The reference model, and the ties seen so far."""

    model: Any
    ties: set[Tie] = field(default_factory=set)
    _right: set[tuple[object, ...]] = field(default_factory=set)

    @torch.inference_mode()
    def logits(self, prompt: list[int], answer: list[int]) -> Tensor:
        """float64 ``[len(answer), vocab_size]``: what each token of the answer was chosen from."""
        torch.set_num_threads(os.cpu_count() or 1)  # a worker in this process has set its own
        ids = torch.tensor([prompt + answer[:-1]])
        result: Tensor = self.model(ids, logits_to_keep=len(answer)).logits[0]
        return result.double()

    def check(
        self,
        prompt: list[int],
        answer: list[int],
        temperature: float = 0.0,
        seed: int = 0,
        choice: int = 0,
    ) -> None:
        """Raise AssertionError, with the proof, at the first wrong token."""
        key = (tuple(prompt), tuple(answer), temperature, seed, choice)
        if key in self._right:
            return
        for index, row in enumerate(self.logits(prompt, answer)):
            scores = row
            if temperature:
                noise = gumbel_noise(row.numel(), seed, choice, len(prompt) + index)
                scores = row / temperature + torch.as_tensor(noise)
            token, best = answer[index], int(scores.argmax())
            gap = float(scores[best] - scores[token])
            assert gap <= TOLERANCE, (
                f"prompt of {len(prompt)} tokens: token {index} is {token}, {gap:.4f} below {best}"
            )
            if token != best:
                self.ties.add(Tie(len(prompt), index, token, best, gap))
        self._right.add(key)


@lru_cache(maxsize=1)
def default_model_judge() -> Judge:
    """A judge for the default model: ``transformers`` reads the GGUF by its own code."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from services.fetch import DEFAULT_MODEL, fetch_gguf

    disable_progress_bar()
    file: Path = fetch_gguf(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return Judge(model.eval())
