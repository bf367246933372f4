"""Traces: what is read, selected, rebuilt into prompts, and how much of it is shared."""

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from loadtest.samples.generate import samples
from loadtest.sharing import Sharing, chain_sharing, prompt_sharing
from loadtest.trace_formats import TraceRequest, TraceTurn
from loadtest.trace_selection import select
from loadtest.traces import SAMPLES, Selection, Trace, TraceError, read_trace, sample_path
from loadtest.writer import IdWriter, WordWriter

WRITERS = {"words": WordWriter(), "ids": IdWriter(32_000)}


def mooncake(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def line(at_ms: float, tokens: int, ids: list[int], answer: int = 7) -> str:
    return (
        f'{{"timestamp": {at_ms}, "input_length": {tokens}, "output_length": {answer},'
        f' "hash_ids": {ids}}}'
    )


def prompts(trace: Trace, **options: float) -> list[str | tuple[int, ...]]:
    built = trace.conversations(WordWriter(), **options)  # type: ignore[arg-type]
    return [conversation.turns[0].text for conversation in built]


def test_samples_are_what_their_generator_makes() -> None:
    made = samples()
    assert {path.name for path in SAMPLES.iterdir() if path.suffix in (".csv", ".json", ".jsonl")}
    for name, text in made.items():
        assert (SAMPLES / name).read_text() == text, f"{name}: run loadtest.samples.generate"
    assert sum(map(len, made.values())) < 60_000


def test_blocks_shared_over_blocks_asked_by_hand() -> None:
    # 8 asked; shared: b and c behind a, then a. The last c stands behind another block.
    asked = ["abc", "abc"[:2], "ac"]
    assert chain_sharing(asked) == Sharing(asked=7, shared=3)
    assert chain_sharing(["ab", "b"]) == Sharing(3, 0)
    assert Sharing(0, 0).rate == 0.0


def test_prompts_are_cut_into_blocks_the_last_short() -> None:
    words = "a b c d e"
    assert prompt_sharing([words, words], 2) == Sharing(6, 3)
    assert prompt_sharing([words, "a b c d x"], 2) == Sharing(6, 2)
    assert prompt_sharing([words, words], 2, full_only=True) == Sharing(4, 2)
    assert prompt_sharing([(1, 2, 3), (1, 2, 3, 4)], 2) == Sharing(4, 1)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("speed", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 1 / 16, 0.03, 1 / 64])
def test_prompts_share_what_the_trace_shares(writer: str, speed: float, scale: float) -> None:
    own = read_trace("sample:mooncake").sharing()
    assert 0.3 < own.rate < 0.6  # a sample that shares nothing, or all, would show nothing
    trace = read_trace("sample:mooncake", selection=Selection(length_scale=scale))
    built = trace.conversations(WRITERS[writer], speed=speed)
    seen = prompt_sharing((conversation.turns[0].text for conversation in built), trace.block)
    assert seen.asked == own.asked
    assert seen.rate == pytest.approx(own.rate, rel=0.01)
    assert trace.sharing() == own
    for request, conversation in zip(trace.requests, built, strict=True):
        assert conversation.at_s == pytest.approx(request.at_s / speed)
        turn = conversation.turns[0]
        tokens = turn.text.split() if isinstance(turn.text, str) else turn.text
        assert len(tokens) == turn.num_tokens == request.turns[0].input_tokens


def test_prompts_that_ignore_hash_ids_share_nothing() -> None:
    """The measure tells: lengths alone, which is what other formats have, give no shared block."""
    trace = read_trace("sample:mooncake", selection=Selection(length_scale=1 / 16))
    alone = Trace(
        trace.path,
        trace.format,
        tuple(type(r)(r.line, r.at_s, r.turns) for r in trace.requests),
    )
    assert prompt_sharing(prompts(alone), trace.block).shared == 0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 16)), min_size=1, max_size=12
    ),
    st.sampled_from([1.0, 0.5, 0.3]),
    st.sampled_from([0, 20, 37]),
)
def test_any_trees_of_blocks_share_alike(
    chats: list[tuple[int, int, int]], scale: float, limit: int
) -> None:
    """Whole trees: id = path to it, whose last block is cut the same way wherever it is asked."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for number, (root, depth, rest) in enumerate(chats):
        path = [(root, *range(level)) for level in range(depth + 1)]
        path[-1] = (*path[-1], -rest)
        hash_ids = tuple(ids.setdefault(step, len(ids)) for step in path)
        turn = TraceTurn(16 * depth + rest, 5)
        requests.append(TraceRequest(number + 1, float(number), (turn,), hash_ids))
    selection = Selection(block=16, length_scale=scale, max_input=limit, too_long="clip")
    notes: Counter[str] = Counter()
    taken = tuple(select(requests, selection, Counter(), notes))
    trace = Trace("-", "mooncake", taken, block=selection.scaled_block)
    built = trace.conversations(IdWriter(1 << 30))
    got = prompt_sharing((c.turns[0].text for c in built), trace.block)
    assert got == trace.sharing()
    assert all(not limit or r.turns[0].input_tokens <= limit for r in taken)
    assert not any("behind another prefix" in note for note in notes)


def test_a_partial_last_block_has_the_rest(tmp_path: Path) -> None:
    path = mooncake(tmp_path, line(0, 1100, [5, 6, 7]), line(500, 1024, [5, 6]))
    trace = read_trace(path, selection=Selection(length_scale=1 / 32))
    assert [r.turns[0].input_tokens for r in trace.requests] == [32 + 2, 32]  # 76 of 512, scaled
    long, short = prompts(trace)
    assert isinstance(long, str)
    assert isinstance(short, str)
    assert long.split()[:32] == short.split()
    assert trace.sharing() == Sharing(5, 2)
    assert trace.sharing(full_only=True) == Sharing(4, 2)


def test_the_chat_template_is_taken_from_the_last_block(tmp_path: Path) -> None:
    path = mooncake(tmp_path, line(0, 1024, [5, 6]), line(1, 1024, [5, 8]))
    trace = read_trace(path, selection=Selection(length_scale=1 / 32))
    texts = [c.turns[0].text for c in trace.conversations(WordWriter(overhead=10))]
    assert [len(text.split()) for text in texts if isinstance(text, str)] == [22, 22]
    assert prompt_sharing(texts, 16) == Sharing(4, 1)
    assert trace.template_note(WordWriter(overhead=15)) == ""
    assert "puts 16 tokens around a prompt" in trace.template_note(WordWriter(overhead=16))
    assert read_trace("sample:burstgpt").template_note(WordWriter(overhead=600)) == ""


def test_an_id_behind_another_prefix_shares_nothing_and_is_said(tmp_path: Path) -> None:
    path = mooncake(tmp_path, line(0, 1024, [1, 2]), line(1, 1024, [3, 2]), line(2, 600, [1, 2]))
    trace = read_trace(path)
    assert trace.sharing() == Sharing(6, 1)
    assert trace.notes == (
        "2 requests have a hash id behind another prefix than before: less is shared",
    )
    assert prompt_sharing(prompts(trace), 512) == Sharing(6, 1)


def test_another_seed_asks_other_texts_that_share_alike() -> None:
    trace = read_trace("sample:mooncake", selection=Selection(length_scale=1 / 32))
    first, again, other = prompts(trace), prompts(trace), prompts(trace, seed=1)
    assert first == again
    alone = prompt_sharing(first, 16)
    assert prompt_sharing(other, 16) == alone
    # The fill of single-token rests may agree by chance; whole blocks do not.
    both = prompt_sharing([*first, *other], 16)
    assert both.shared == pytest.approx(2 * alone.shared, abs=3)


def test_windows_limits_and_order(tmp_path: Path) -> None:
    times = [3000, 1000, 2000, 9000, 4000]
    lines = [line(at, 512, [i], answer=i + 1) for i, at in enumerate(times)]
    path = mooncake(tmp_path, *lines)
    trace = read_trace(path)
    assert [r.at_s for r in trace.requests] == [0.0, 1.0, 2.0, 3.0, 8.0]
    assert [r.line for r in trace.requests] == [2, 3, 1, 5, 4]
    assert trace.notes == ("3 lines were out of order in time, and are sorted",)
    assert trace.rate == pytest.approx(4 / 8)
    window = read_trace(path, selection=Selection(start_s=1.0, duration_s=2.0))
    assert [(r.line, r.at_s) for r in window.requests] == [(3, 0.0), (1, 1.0)]
    assert [r.line for r in read_trace(path, selection=Selection(max_requests=2)).requests] == [
        2,
        3,
    ]
    skipping = read_trace(path, selection=Selection(max_output=3))
    assert [r.line for r in skipping.requests] == [2, 3, 1]
    assert skipping.skipped == {"over max_output 3": 2}
    clipping = read_trace(path, selection=Selection(max_model_len=10, too_long="clip"))
    assert {(r.turns[0].input_tokens, r.turns[0].output_tokens) for r in clipping.requests} == {
        (10 - n, n) for n in (1, 2, 3, 4, 5)
    }
    assert "5 were clipped to max_model_len 10" in clipping.notes


def test_reading_ends_with_the_window(tmp_path: Path) -> None:
    """A wrong line far behind the window is never seen: the file is not read to its end."""
    lines = [line(at, 512, [1]) for at in range(30_000)]
    path = mooncake(tmp_path, *lines, "broken")
    assert len(read_trace(path, selection=Selection(duration_s=1.0)).requests) == 1000
    assert len(read_trace(path, selection=Selection(max_requests=7)).requests) == 7
    with pytest.raises(TraceError, match="trace.jsonl:30001: not JSON"):
        read_trace(path)


def test_far_out_of_order_is_an_error(tmp_path: Path) -> None:
    path = mooncake(tmp_path, *(line(at, 512, [1]) for at in [*range(5, 20_000), 0]))
    with pytest.raises(TraceError, match=":19996: more than 10,000 lines out of order"):
        read_trace(path)


def test_other_times_for_the_same_requests() -> None:
    trace = read_trace("sample:sharegpt")
    with pytest.raises(ValueError, match="sharegpt has no times: its requests need arrivals"):
        trace.conversations(WordWriter())
    built = trace.arriving([0.5, 1.5, 2.0]).conversations(WordWriter(), speed=2.0, think_s=3.0)
    assert [c.at_s for c in built] == [0.25, 0.75, 1.0]
    later = [turn.think_s for c in built for turn in c.turns[1:]]
    assert later
    assert set(later) == {3.0}
    assert all(c.turns[0].think_s == 0 for c in built)


def test_a_summary_for_the_terminal() -> None:
    text = read_trace("sample:mooncake").describe()
    own = read_trace("sample:mooncake").sharing()
    assert text.startswith("sample:mooncake (mooncake): 170 requests in ")
    assert "input tokens: p50 " in text
    assert f"sharing {own.rate:.1%}: {own.shared:,} of {own.asked:,} blocks of 512" in text
    assert (
        "left out: 2 without a question and an answer" in read_trace("sample:sharegpt").describe()
    )


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"too_long": "cut"}, "too_long 'cut': want skip or clip"),
        ({"duration_s": 0}, "a window"),
        ({"start_s": -1}, "a window"),
        ({"length_scale": 0}, "length_scale 0"),
        ({"length_scale": math.nan}, "length_scale nan"),
        ({"max_requests": -1}, "max_requests -1"),
        ({"max_model_len": 1}, "max_model_len 1"),
        ({"block": 0}, "block 0"),
    ],
)
def test_a_selection_without_sense(values: dict[str, float], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Selection(**values)  # type: ignore[arg-type]


def test_errors_of_use() -> None:
    with pytest.raises(ValueError, match="no sample 'azure'; there are azure-2023, azure-2024, b"):
        sample_path("azure")
    with pytest.raises(ValueError, match="trace format 'x': want auto, mooncake, azure"):
        read_trace("sample:mooncake", "x")
    with pytest.raises(ValueError, match="speed 0"):
        read_trace("sample:mooncake").conversations(WordWriter(), speed=0)
    with pytest.raises(ValueError, match="blocks of 512 tokens would become 2"):
        read_trace("sample:mooncake", selection=Selection(length_scale=0.004))
    with pytest.raises(ValueError, match="no window"):
        read_trace("sample:sharegpt", selection=Selection(start_s=5))
    with pytest.raises(TraceError, match="no request was taken: 170 over max_input 1"):
        read_trace("sample:mooncake", selection=Selection(max_input=1))
