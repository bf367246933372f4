"""Each format: what its lines say, how it is recognised, and what is wrong with a wrong line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.traces import SAMPLES, Selection, TraceError, TraceRequest, read_trace

MOONCAKE = '{"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
NEWER = BURST.replace("Timestamp", "Timestamp,Session ID,Elapsed time")
DATA = sorted(p for p in SAMPLES.iterdir() if p.suffix in (".csv", ".json", ".jsonl"))


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(requests: tuple[TraceRequest, ...]) -> list[tuple[float, int, int]]:
    return [(round(r.at_s, 6), r.turns[0].input_tokens, r.turns[0].output_tokens) for r in requests]


def chat(*said: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "1", "conversations": [{"from": who, "value": text} for who, text in said]}


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.name)
def test_a_format_is_found_by_its_content(path: Path, tmp_path: Path) -> None:
    trace = read_trace(path)
    assert trace.format == path.stem.split("-")[0]
    zipped = written(tmp_path, gzip.compress(path.read_bytes()))
    assert read_trace(zipped).requests == trace.requests
    marked = written(tmp_path, b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_trace(marked).requests == trace.requests


def test_mooncake(tmp_path: Path) -> None:
    path = written(tmp_path, f"{MOONCAKE}\n\n{MOONCAKE.replace('1500', '2750.5')}")
    trace = read_trace(path)
    assert rows(trace.requests) == [(0.0, 600, 9), (1.2505, 600, 9)]
    assert [(r.line, r.hash_ids) for r in trace.requests] == [(1, (1, 2)), (3, (1, 2))]
    other = MOONCAKE.replace("[1, 2]", "[1, 2, 3]")
    assert len(read_trace(written(tmp_path, other), selection=Selection(block=256)).requests) == 1


def test_azure_of_2023_and_2024(tmp_path: Path) -> None:
    old = f"{AZURE}\n2023-11-16 23:59:59.5000005,4808,10\n2023-11-17 00:00:00.7500000,3180,8\n"
    assert rows(read_trace(written(tmp_path, old)).requests) == [(0.0, 4808, 10), (1.25, 3180, 8)]
    new = (
        f"{AZURE}\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
        "2024-05-10 02:00:01.25+02:00,7,7\n"
    )
    assert rows(read_trace(written(tmp_path, new)).requests) == [
        (0.0, 2162, 5),
        (0.99007, 2399, 6),
        (1.24007, 7, 7),
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"{BURST}\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,0,0,0,API log\n"
        "118,GPT-4,417,0,417,API log\n118.5,GPT-4,417,276,693,API log\n",
        f"{NEWER}\n19440110.0,a-b,43,GPT-4,472,18,490,Conversation log\n"
        "19440150.0,,,GPT-4,0,0,0,API log\n19440160.0,,,GPT-4,417,0,417,API log\n"
        "19440223.5,a-b,43,GPT-4,417,276,693,Conversation log\n",
    ],
    ids=["older", "newer"],
)
def test_burstgpt_leaves_out_failures_and_counts_them(tmp_path: Path, text: str) -> None:
    trace = read_trace(written(tmp_path, text))
    assert rows(trace.requests) == [(0.0, 472, 18), (113.5, 417, 276)]
    assert trace.skipped == {"failed or empty: no tokens asked, or none answered": 2}


SHAREGPT = [
    chat(("human", "one two three"), ("gpt", "a b"), ("human", "four"), ("gpt", "c")),
    chat(("system", "be kind"), ("gpt", "hello"), ("user", "x y"), ("assistant", "z")),
    chat(("human", "kept"), ("gpt", "yes"), ("human", "no answer")),
    chat(("human", "kept"), ("gpt", "yes"), ("gpt", "twice"), ("human", "lost"), ("gpt", "lost")),
    chat(("human", "  "), ("gpt", "an answer to nothing")),
    chat(("human", None), ("gpt", "an answer to null")),
    chat(("gpt", "only")),
    {"id": "none"},
    {"conversations": ["text", 5]},
]


@pytest.mark.parametrize("layout", ["list", "indented", "lines", "one"])
def test_sharegpt(tmp_path: Path, layout: str) -> None:
    text = {
        "list": json.dumps(SHAREGPT),
        "indented": json.dumps(SHAREGPT, indent=2),
        "lines": "\n".join(map(json.dumps, SHAREGPT)),
        "one": json.dumps(SHAREGPT[0]),
    }[layout]
    trace = read_trace(written(tmp_path, text), count_tokens=lambda text: 10 * len(text.split()))
    turns = [[(t.text, t.input_tokens, t.output_tokens) for t in r.turns] for r in trace.requests]
    assert turns[0] == [("one two three", 30, 20), ("four", 10, 10)]
    if layout != "one":
        assert turns[1:] == [[("x y", 20, 10)], [("kept", 10, 10)], [("kept", 10, 10)]]
        assert trace.skipped == {"without a question and an answer": 5}
    assert not trace.timed
    assert trace.requests[0].line == (2 if layout == "indented" else 1)


def test_sharegpt_of_one_turn_and_cut(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([chat(*SHAREGPT_LONG)]))

    def turns(**values: Any) -> list[tuple[str, int, int]]:
        chosen = Selection(**values)
        trace = read_trace(path, selection=chosen, count_tokens=lambda t: len(t.split()))
        return [(t.text, t.input_tokens, t.output_tokens) for t in trace.requests[0].turns]

    first, second = ("a  b\nc d", 4, 6), ("e f", 2, 2)
    assert turns() == [first, second]
    assert turns(first_turn=True) == [first]
    assert turns(length_scale=0.5) == [("a  b", 2, 3), ("e", 1, 1)]
    assert turns(max_model_len=13, too_long="clip") == [first]
    assert turns(max_input=3, too_long="clip") == [("a  b\nc", 3, 6)]
    assert turns(max_output=4, too_long="clip") == [(*first[:2], 4), second]


SHAREGPT_LONG = (
    ("human", "a  b\nc d"),
    ("gpt", "1 2 3 4 5 6"),
    ("human", "e f"),
    ("gpt", "7 8"),
)


def test_a_list_longer_than_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_trace("sample:sharegpt")
    for size in (1, 7, 1000):
        monkeypatch.setattr("loadtest.sharegpt._CHUNK", size)
        assert read_trace("sample:sharegpt").requests == whole.requests


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{MOONCAKE}\n{MOONCAKE[:-1]}", ":2: not JSON: Expecting ',' delimiter at column"),
        (f"{MOONCAKE}\n[1]", ":2: want a JSON object"),
        (
            MOONCAKE.replace("timestamp", "time"),
            ":1: no 'timestamp'; a line has timestamp,",
        ),
        (MOONCAKE.replace("600", "-1"), ":1: input_length: want a whole number of tokens, got -1"),
        (MOONCAKE.replace("600", "true"), ":1: input_length: want a number, got True"),
        (MOONCAKE.replace("9", '"9"'), ":1: output_length: want a number, got '9'"),
        (MOONCAKE.replace("1500", "NaN"), ":1: timestamp: want a number, got nan"),
        (MOONCAKE.replace("[1, 2]", "[1]"), ":1: 1 hash_ids for input_length 600: want 2, one for"),
        (MOONCAKE.replace("[1, 2]", '["1"]'), ":1: hash_ids: want a list of whole numbers, got "),
        (MOONCAKE.replace(', "hash_ids": [1, 2]', ""), ":1: hash_ids: want a list of whole numb"),
        (f"{AZURE}\n2023-11-16 18:17:03,1,1\nyesterday,1,1", ":3: TIMESTAMP 'yesterday': want a t"),
        (f"{AZURE}\n2023-11-16 18:17:03,1.5,1", ":2: ContextTokens '1.5': want a whole number"),
        (f"{AZURE}\n2023-11-16 18:17:03,1", ":2: 2 values; the header has 3"),
        (f"{AZURE}\n2023-11-16 18:17:03,1,-1", ":2: GeneratedTokens '-1': want a whole number"),
        (f"{BURST}\nnan,GPT-4,1,1,2,API log", ":2: Timestamp 'nan': want seconds"),
        (f"{BURST}\n5,GPT-4,1,,2,API log", ":2: Response tokens '': want a whole number"),
        ("time,tokens\n1,2\n", ":1: no known format: 'time,tokens'. Known are JSON lines with ti"),
        ("", ":1: no known format: ''"),
        (AZURE, ": no request was taken"),
        (b"\xff\xfe\x00{", ": cannot be read: 'utf-8' codec"),
        (gzip.compress(MOONCAKE.encode() * 99)[:-20], ": cannot be read"),
        ('[{"conversations": []},\n {"conversations": [}\n]', ":2: not JSON: Expecting value"),
        ('[{"conversations": []},\n 5]', ":2: an entry is a JSON object, not int"),
        ('[{"conversations": []},\n', "the list has no end: the file was cut"),
        ('[{"conversations": [{"from": "hum', ":1: not JSON: Unterminated string"),
        ("[]", ": no request was taken"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str | bytes, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:")
    assert what in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none.csv: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
    path = written(tmp_path, MOONCAKE)
    with pytest.raises(TraceError, match="no column TIMESTAMP, ContextTokens, GeneratedTokens"):
        read_trace(path, "azure")
