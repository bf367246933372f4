"""What is not a number never becomes text, and spoils nothing that comes later."""

from __future__ import annotations

from math import nan

import pytest
from torch import Tensor

from services.engine import runner
from services.engine.runner import ModelRunner
from tests.guards.rig import ASKED, OTHER, Answer, Pairs, Worker, right


@pytest.mark.parametrize("guarded", [True, False])
def test_blocks_that_were_given_up_are_zeroed(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull arrives damaged and its blocks go to another prompt, which does not fill them. What is
    behind its end has no weight, but nothing times NaN is NaN.
    """
    if not guarded:
        monkeypatch.setattr(ModelRunner, "zero", lambda self, blocks: None)
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4)
    asked, other = Answer(ASKED), Answer(OTHER, b"other")

    def damage(pairs: Pairs) -> Pairs:
        for _, local in pairs:
            d.region.kv[local] = nan
        return []

    d.reads.fault = damage
    asked.ticket(d, p)
    asked.decode(d, p)
    d.land()
    asked.hear(d)
    assert asked.failures

    other.decode(d)
    other.finish(d)
    if guarded:
        assert other.tokens == right(OTHER)
    else:
        assert "not a number" in other.failures[0].message


@pytest.mark.parametrize("guarded", [True, False])
def test_no_token_is_chosen_from_what_is_not_a_number(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV is damaged where it lies, after it was verified. The argmax of NaNs is token 0; instead
    the attempt fails, its KV leaves the prefix cache, and the next attempt goes on from the tokens
    so far.
    """
    if not guarded:
        monkeypatch.setattr(runner, "sample", greedy)
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4)
    asked = Answer(ASKED)
    asked.ticket(d, p)
    asked.decode(d, p)
    d.land()
    d.step(2)
    asked.hear(d)
    (seq,) = d.engine.scheduler.running
    d.region.kv[seq.blocks[0], -1, 1, 0, 3, 0] = nan
    asked.finish(d)

    if guarded:
        (failure,) = asked.failures
        assert (failure.kind, asked.finished) == ("internal", False)
        assert asked.tokens == right(ASKED)[: len(asked.tokens)]
        asked.retry(d, p)
        assert asked.tokens == right(ASKED)
        p.check_idle()
        d.check_idle()
    else:
        assert asked.finished
        assert asked.tokens != right(ASKED)
        assert asked.tokens[-1] == 0


def greedy(logits: Tensor, rows: object) -> list[int]:
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def test_a_prompt_whose_logits_are_not_numbers_has_no_ticket() -> None:
    """Neither a first token nor blocks that a peer could read or the cache could give away."""
    p = Worker("p", 7, blocks=5)
    p.region.kv[:] = nan  # also in blocks that nobody has given up
    asked = Answer(ASKED)
    asked.prefill(p)
    p.run()
    asked.hear(p)
    assert [failure.kind for failure in asked.failures] == ["internal"]
    assert asked.prefilled is None
    p.check_idle()
    p.region.kv[:] = 0
    asked.attempt += 1
    asked.prefill(p)
    p.run()
    asked.hear(p)
    assert asked.tokens == right(ASKED)[:1]
