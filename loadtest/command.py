"""``baton loadtest``: options in; a folder of results, a table and an exit status out.

    run_loadtest   one server: a run, or the search for its highest rate
    run_compare    several targets by turns
    run_report     the report of a run that is over, by other objectives if wished

Ctrl-C ends each of them early: what there is by then is kept and reported.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from loadtest.calibrate import calibrate
from loadtest.client import Client, ClientOptions, ServerUnusable
from loadtest.compare import Comparer, Plan, Search, Sweep, Workload
from loadtest.comparison import ComparisonReport
from loadtest.conversation import Conversation
from loadtest.event_loop import new_event_loop
from loadtest.figures import summarize
from loadtest.html_report import run_html
from loadtest.options import CompareOptions, RunOptions, ServerOptions, WorkloadOptions
from loadtest.ratios import section
from loadtest.record import Record
from loadtest.results import (
    COMPARISON,
    Requests,
    command_line,
    facts,
    new_folder,
    read_comparison,
    say,
    write_comparison,
)
from loadtest.runner import run
from loadtest.search import RateSearch
from loadtest.slo import SLO
from loadtest.source import Extent, Source, load_words, slos_of, source_of, writer_of
from loadtest.store import REPORT, SUMMARY, RunFolder, RunInfo, read_run
from loadtest.targets import Target, TargetError, parse_targets
from loadtest.terminal import Progress, comparison_table, summary_table
from loadtest.trial import Comparison, Window
from loadtest.wording import digits
from loadtest.writer import WordWriter, Writer

Result = TypeVar("Result")

OK, NOTHING_ENDED_WELL, INTERRUPTED = 0, 1, 130
WARM_UP_SEEDS = 1 << 20  # apart from those of the run: texts that it does not have


class LoadTestError(Exception):
    """It cannot be run as asked; the message is for the user."""


@contextlib.contextmanager
def _wrong_use() -> Iterator[None]:
    """What is wrong with the options, the server or a file, as one error."""
    try:
        yield
    except BrokenPipeError:  # nobody reads on
        raise
    except (ValueError, OSError, ServerUnusable, TargetError) as error:
        raise LoadTestError(str(error)) from error


def run_loadtest(server: ServerOptions, workload: WorkloadOptions, options: RunOptions) -> int:
    """The exit status. Raises LoadTestError."""
    with _wrong_use():
        source, asker = source_of(workload), Asker(server)
        _check(options)
        if not options.find_max_rate:
            folder = new_folder(options.out)
            return in_loop(_run(asker, workload, options, source, folder))
        search = RateSearch(source.extent.rate, options.attainment, options.max_probes)
        target = Target("server", url=asker.client_options().url)
        plan = Search(search, workload.seed)
        return _compared(asker, workload, options, source, (target,), plan)


def run_compare(
    targets: Sequence[str],
    server: ServerOptions,
    workload: WorkloadOptions,
    options: RunOptions,
    compare: CompareOptions,
) -> int:
    """The exit status. Raises LoadTestError."""
    with _wrong_use():
        source, asker = source_of(workload), Asker(server)
        _check(options)
        parsed = parse_targets(targets)
        rates = _rates(compare.rates) or (source.extent.rate,)
        plan: Plan = Sweep(rates, compare.rounds, workload.seed, options.attainment)
        if options.find_max_rate:
            search = RateSearch(rates[0], options.attainment, options.max_probes)
            plan = Search(search, workload.seed)
        return _compared(asker, workload, options, source, parsed, plan, compare.restart)


def _check(options: RunOptions) -> None:
    if not 0 < options.attainment <= 1:
        raise ValueError(f"attainment {options.attainment:g}: want a share above 0, at most 1")
    if options.max_probes < 1:
        raise ValueError(f"max-probes {options.max_probes}: want 1 or more")


def run_report(folder: str, slo: str = "") -> int:
    """Write a report anew: a run's by other objectives if there are any. Raises LoadTestError."""
    path = Path(folder)
    with _wrong_use():
        if (path / COMPARISON).exists():
            if slo:
                raise ValueError(
                    f"{folder} is of a comparison, whose objectives stay what they were"
                )
            report = read_comparison(path)
            write_comparison(path, report)
            table = comparison_table(report)
        elif (path / SUMMARY).exists():
            stored = read_run(path)
            summary = summarize(stored.result, slos_of(slo, list(stored.slos), stored.slos))
            page = run_html(stored.info, stored.result, summary)
            (path / REPORT).write_text(page, encoding="utf-8")
            table = summary_table(summary, sys.stdout.isatty())
        else:
            raise ValueError(
                f"{folder}: neither a run's folder nor that of a comparison that ended"
            )
    print(table)
    print(path / REPORT)
    return OK


# --- the server ----------------------------------------------------------------------------------


@dataclass
class Asker:
    """Makes clients, and the writer of their prompts, completed by the first server asked."""

    options: ServerOptions
    writer: Writer = field(init=False)
    model: str = field(default="", init=False)
    _to_calibrate: bool = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for options that make no sense."""
        self.writer, self._to_calibrate = writer_of(self.options.prompts)
        self.client_options()

    def client_options(self, url: str = "") -> ClientOptions:
        """For a server, by default that of the options. Raises ValueError, OSError."""
        given = self.options
        try:
            extra = json.loads(given.extra_body or "{}")
        except ValueError as error:
            raise ValueError(f"extra-body: not JSON: {error}") from None
        if not isinstance(extra, dict):
            raise ValueError("extra-body: want a JSON object")
        key = Path(given.api_key_file).read_text().strip() if given.api_key_file else ""
        return ClientOptions(
            url=url or given.url,
            model=given.model,
            endpoint=given.endpoint,
            api_key=key,
            ignore_eos=given.ignore_eos,
            temperature=given.temperature,
            timeout_s=given.timeout_s,
            extra_body=extra,
        )

    @contextlib.asynccontextmanager
    async def connect(self, url: str = "") -> AsyncIterator[Client]:
        """A client. Raises ServerUnusable."""
        async with Client(self.client_options(url)) as client:
            self.model = client.model
            if self._to_calibrate:
                assert isinstance(self.writer, WordWriter)
                self.writer = await calibrate(client, self.writer)
                self._to_calibrate = False
            yield client


# --- a run ---------------------------------------------------------------------------------------


async def _run(
    asker: Asker, workload: WorkloadOptions, options: RunOptions, source: Source, path: Path
) -> int:
    stop = stop_on_signals()
    extent = source.extent
    async with asker.connect() as client:
        warm_up, _ = source.conversations(
            asker.writer, replace(extent, text_seed=_other(extent.text_seed))
        )
        await run(warm_up[: options.warmup], client, concurrency=1, stop=stop)
        conversations, remarks = source.conversations(asker.writer, extent)
        if not conversations:
            raise ValueError("no request is due in that time: a higher rate or a longer duration")
        info = RunInfo(
            target=asker.client_options().url,
            workload=f"{source.name}: {source.about}",
            load=load_words(workload, extent),
            model=asker.model,
            command=command_line(),
            facts=facts(asker.writer) | {"Seed": str(workload.seed)},
        )
        for line in (f"{info.model} at {info.target}", info.workload, info.load, *remarks):
            print(line)
        num_planned = sum(len(conversation.turns) for conversation in conversations)
        progress = Progress(
            sys.stderr,
            num_planned,
            0.0 if workload.concurrency else conversations[-1].at_s,
        )
        with RunFolder(path, info, source.slos, num_planned) as folder, showing(progress):

            def ended(record: Record) -> None:
                folder.add(record)
                progress.done(record)

            result = await run(
                conversations,
                client,
                concurrency=workload.concurrency,
                stop=stop,
                grace_s=options.grace_s,
                on_record=ended,
                on_sent=progress.sent,
            )
        summary = summarize(result, source.slos)
        folder.finish(result, summary, run_html(info, result, summary))
    print(summary_table(summary, sys.stdout.isatty()))
    print(f"{path / REPORT}")
    if result.interrupted:
        return INTERRUPTED
    return OK if summary.total.num_ok else NOTHING_ENDED_WELL


@contextlib.contextmanager
def showing(progress: Progress) -> Iterator[None]:
    """Show the progress meanwhile."""
    task = asyncio.get_running_loop().create_task(progress.show())
    try:
        yield
    finally:
        task.cancel()


# --- a comparison --------------------------------------------------------------------------------


def _compared(
    asker: Asker,
    workload: WorkloadOptions,
    options: RunOptions,
    source: Source,
    targets: Sequence[Target],
    plan: Plan,
    restart: bool = False,
) -> int:
    if not any(slo != SLO() for slo in source.slos.values()):
        raise ValueError("want objectives to judge by, such as --slo ttft=500ms,tpot=50ms")
    if workload.concurrency or workload.requests:
        raise ValueError(
            "a search or a comparison has rates and durations: without concurrency and requests"
        )
    path = new_folder(options.out)
    window = Window(source.extent.duration_s)
    comparison = in_loop(
        compared(asker, source, targets, plan, window, {"SLO": source.slos}, path, restart)
    )
    description = f"{source.about}; {digits(window.duration_s)} s of requests each"
    report = ComparisonReport(
        title="Highest rate" if len(targets) == 1 else "Comparison",
        started=comparison.started,
        command=command_line(),
        targets={target.name: target.what for target in targets},
        sections=[section(comparison, source.name, description)],
        attainment=comparison.attainment,
        facts=facts(asker.writer) | {"Model": asker.model, "Seed": str(workload.seed)},
    )
    write_comparison(path, report)
    print(comparison_table(report))
    print(f"{path / REPORT}")
    if comparison.interrupted:
        return INTERRUPTED
    ended = (record for trial in comparison.trials for record in trial.result.records)
    return OK if any(not record.error for record in ended) else NOTHING_ENDED_WELL


async def compared(
    asker: Asker,
    source: Source,
    targets: Sequence[Target],
    plan: Plan,
    window: Window,
    objectives: Mapping[str, Mapping[str, SLO]],
    path: Path,
    restart: bool = False,
) -> Comparison:
    """Make the trials; every request is in ``path``'s requests.jsonl as soon as it has ended."""
    with Requests(path) as requests:
        comparer = Comparer(
            workload=workload_of(source, asker, window),
            window=window,
            objectives=objectives,
            connect=asker.connect,
            stop=stop_on_signals(),
            say=say,
            on_record=requests.add,
        )
        return await comparer.compare(targets, plan, path, restart)


def workload_of(source: Source, asker: Asker, window: Window) -> Workload:
    """A source as a comparison wants it: texts by the writer as it is when they are asked for."""

    def conversations(rate: float, seed: int) -> list[Conversation]:
        extent = Extent(rate, duration_s=window.duration_s, seed=seed, text_seed=seed)
        return source.conversations(asker.writer, extent)[0]

    return conversations


# --- bits and pieces -----------------------------------------------------------------------------


def in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it in an event loop with precise timers."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def stop_on_signals() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM; the second Ctrl-C is as usual."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def stopping() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping)
    return stop


def _rates(text: str) -> tuple[float, ...]:
    """``"0.5,1,2"``, ascending."""
    try:
        rates = tuple(sorted(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"rates {text!r}: want numbers, 0.5,1,2") from None
    if any(not 0 < rate < float("inf") for rate in rates):
        raise ValueError(f"rates {text!r}: want numbers above 0")
    return rates


def _other(seed: int) -> int:
    return seed + WARM_UP_SEEDS
