"""Steady load of questions whose answers are known, and the verdict on each answer."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.chaos import exchange
from tests.chaos.exchange import Reply, send
from tests.chaos.fleet import Clock
from tests.chaos.questions import Asking, Question, asking
from tests.chaos.record import RIGHT, SUSPECT, TIE, WRONG, Record, same
from tests.support.local_server import local_server
from tests.support.reference import default_model_judge

MIXED = ("--mixed", "1", "--prefill", "0", "--decode", "0")
PAUSE_S = 0.5  # after a request that failed, as clients do
NUM_AT_ONCE = 12  # questions asked of the mixed engine


def mixed_answers(questions: Sequence[Question], sizes: Sequence[str]) -> list[Reply]:
    """The answers of one mixed engine in this process."""
    with local_server((*MIXED, *sizes)) as server, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        replies = list(
            pool.map(lambda q: send(server.url, q.path, q.body, "reference", 300), questions)
        )
    for question, reply in zip(questions, replies, strict=True):
        assert reply.end == exchange.ANSWERED, (question, reply)
    return replies


class Load:
    """Clients, each of which asks one question after the other until told to stop."""

    def __init__(
        self,
        url: str,
        seed: int,
        questions: Sequence[Question],
        answers: Sequence[Reply],
        num_clients: int,
        deadline_s: float,
        clock: Clock,
    ) -> None:
        """The last question is the one that floods are made of, and is not asked otherwise."""
        self.records: list[Record] = []
        self._url, self._seed, self._deadline_s = url, seed, deadline_s
        self._questions, self._answers = questions, answers
        self._clock = clock
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[Exception] = []
        for _ in range(num_clients):
            self._start(self._client)

    def stop(self) -> None:
        """Wait until the requests that are under way have ended. Raises what a client has died of:
        the load was not what it should have been.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def flood(self, count: int) -> None:
        """So many long prompts more, at once."""
        for number in [self._number() for _ in range(count)]:
            how = Asking(number, len(self._questions) - 1, number % 2 == 0, f"flood-{number}", None)
            self._start(self._ask, how, True)

    def _start(self, act: Callable[..., object], *args: object) -> None:
        thread = threading.Thread(target=self._run, args=(act, *args), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, act: Callable[..., object], *args: object) -> None:
        try:
            act(*args)
        except Exception as error:
            self._failures.append(error)

    def _number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def _client(self) -> None:
        while not self._stop.is_set():
            record = self._ask(asking(self._seed, self._number(), len(self._questions) - 1))
            if not record.answered and record.outcome != exchange.CUT:
                self._stop.wait(PAUSE_S)

    def _ask(self, how: Asking, flood: bool = False) -> Record:
        record = ask(
            self._url, self._questions[how.question], how, label(self._seed, how.number),
            self._deadline_s, self._answers[how.question], self._clock,
        )  # fmt: skip
        record.flood = flood
        with self._lock:
            self.records.append(record)
        return record


def label(seed: int, number: int) -> str:
    """The name that a request has in the server's logs."""
    return f"chaos-{seed}-{number}"


def ask(
    url: str,
    question: Question,
    how: Asking,
    name: str,
    deadline_s: float,
    answer: Reply,
    clock: Clock,
) -> Record:
    """Ask once, and compare."""
    body = question.body | ({"cache_salt": how.salt} if how.salt else {})
    if how.stream:
        body |= {"stream": True}
    start_s = clock.now()
    reply = send(url, question.path, body, name, deadline_s, how.cut)
    outcome = reply.end
    if outcome == exchange.ANSWERED:
        outcome = RIGHT if same(reply, answer) else SUSPECT
    return Record(how.number, how.question, how.stream, start_s, clock.now(), outcome, reply)


def settle(
    records: Sequence[Record], questions: Sequence[Question], answers: Sequence[Reply]
) -> None:
    """Tell ties from wrong answers among the suspects, by teacher forcing."""
    for record in records:
        if record.outcome != SUSPECT:
            continue
        try:
            check_tie(record.reply, questions[record.question], answers[record.question])
            record.outcome = TIE
        except AssertionError as error:
            record.outcome = WRONG
            record.reply.note = str(error)


def check_tie(reply: Reply, question: Question, answer: Reply) -> None:
    """Raise AssertionError unless the ids differ from the answer's, and are as good."""
    body = question.body
    assert reply.prompt_ids == answer.prompt_ids, "another prompt"
    assert reply.choices.keys() == answer.choices.keys(), "another number of choices"
    assert any(reply.choices[i].ids != answer.choices[i].ids for i in answer.choices), (
        f"the right ids, but {reply.choices} instead of {answer.choices}"
    )
    judge = default_model_judge()
    for index, choice in reply.choices.items():
        full = len(choice.ids) == body["max_tokens"]
        assert choice.ids, "no tokens"
        assert full or choice.finish == "stop", f"{choice.finish} after {len(choice.ids)} tokens"
        judge.check(reply.prompt_ids, choice.ids, body["temperature"], body.get("seed", 0), index)
