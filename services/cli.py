"""The command ``baton``: flags from the fields of the configuration, errors in one line.

Flags and their help come from the dataclasses: each field's name is the flag, its default the
default, and the comment beside it the help. What the commands do is imported when it is needed, so
that ``--help`` answers at once.
"""

import argparse
import ast
import inspect
import io
import os
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from loadtest.options import CompareOptions, RunOptions, ServerOptions, WorkloadOptions
from router.config import RouterConfig
from services.config import LIMITS, ROLES, AppConfig, ConfigError, Limit, WorkerConfig, load
from services.engine.config import EngineConfig
from services.fetch import ALIASES, DEFAULT_MODEL, fetch
from services.machine import calm_openmp
from services.model_cache import FetchError
from services.planner.command import ProfileOptions, run_profile

WRONG_USE = 2


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, as all errors of ``baton``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        fail(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit status."""
    try:
        return run(build_parser().parse_args(argv))
    except (ConfigError, FetchError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone; Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(args: argparse.Namespace) -> int:
    """The command that was asked for."""
    if args.command == "fetch":
        print(fetch(args.model))
        return 0
    if args.command == "drain":
        from services.drain import DrainOptions, run_drain

        names = {field.name for field in fields(DrainOptions)}
        given = {name: value for name, value in vars(args).items() if name in names}
        return run_drain(DrainOptions(**given))
    if args.command == "leave":
        from services.leave import LeaveOptions, run_leave

        given = {name: value for name, value in vars(args).items() if name != "command"}
        return run_leave(LeaveOptions(**given))
    if args.command == "doctor":
        from services.doctor.command import DoctorOptions, run_doctor

        return run_doctor(DoctorOptions(need=args.need, json=args.json, config=args.config))
    if args.command == "loadtest":
        return _run_loadtest(args)
    own = {"command", "config", *(field.name for field in fields(ProfileOptions))}
    flags = {k: v for k, v in vars(args).items() if k not in own}
    config = load(getattr(args, "config", None), flags)
    if args.command == "profile":
        return run_profile(config, _of(ProfileOptions, args))
    if args.command == "local":
        if config.autoscaling.scales:
            raise ConfigError("baton local does not scale its pools; give numbers, or baton serve")
        calm_openmp()
        from services.local import run_local

        run_local(config)
        return 0
    from services.serve import run_serve

    return run_serve(config)


def _run_loadtest(args: argparse.Namespace) -> int:
    """A run, a search, a comparison, or a report of a run that is over."""
    from loadtest import command

    server, workload = _of(ServerOptions, args), _of(WorkloadOptions, args)
    options = _of(RunOptions, args)
    try:
        if args.what == "report":
            return command.run_report(args.folder, workload.slo)
        if args.what == "compare":
            compare = _of(CompareOptions, args)
            return command.run_compare(args.targets, server, workload, options, compare)
        return command.run_loadtest(server, workload, options)
    except command.LoadTestError as error:
        fail(str(error))


def _of(cls: type[Any], args: argparse.Namespace) -> Any:
    """A dataclass of the flags that were given."""
    names = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in vars(args).items() if name in names})


def fail(message: str) -> NoReturn:
    """End the process with an error that the user can act on."""
    print(f"baton: error: {message}", file=sys.stderr)
    raise SystemExit(WRONG_USE)


def _version() -> str:
    try:
        return version("baton-serving")
    except PackageNotFoundError:
        return "(not installed: runs from its source)"


# --- flags -------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = Parser(
        prog="baton",
        description="Serves large language models with prefill and decode on separate workers.",
    )
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in [
        ("serve", "serve a model: router and workers in processes of their own, on a local Ray"),
        ("local", "the same in one process, to try it and for tests"),
    ]:
        _add_flags(
            commands.add_parser(
                name, help=text, description=text, argument_default=argparse.SUPPRESS
            )
        )
    _add_drain(commands)
    _add_leave(commands)
    _add_doctor(commands)
    _add_loadtest(commands)
    _add_profile(commands)
    text = "download, check and convert a model into the cache"
    command = commands.add_parser("fetch", help=text, description=text)
    command.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"{', '.join(ALIASES)}, a folder, a GGUF file, or a Hugging Face id:"
        f" org/name[@revision], org/name:file.gguf[@revision] (default: {DEFAULT_MODEL})",
    )
    return parser


def _add_drain(commands: Any) -> None:
    text = "let a worker finish or hand back what it does, and leave"
    command = commands.add_parser(
        "drain",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Under baton serve another one takes its place.",
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument("worker", nargs="?", metavar="WORKER", help="id, as baton serve prints it")
    for flag, metavar, about in [
        ("--on", "HOST", "all workers of this host instead"),
        ("--url", "URL", "of the API (default: http://127.0.0.1:8000)"),
        ("--secret-file", "FILE", "the deployment's secret; baton serve prints where it is"),
        ("--api-key-file", "FILE", "a key of the API, where it asks for one"),
    ]:
        command.add_argument(flag, metavar=metavar, help=about)
    command.add_argument(
        "--deadline",
        metavar="S",
        type=float,
        dest="deadline_s",
        help="after so many seconds it hands back what still runs (default: 30)",
    )


def _add_leave(commands: Any) -> None:
    text = "let Serve take everything from this Ray node, which is about to go"
    command = commands.add_parser(
        "leave",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, and wait for that: the preStop of a pod. Exit"
        " status: 0 when nothing is left, else 1.",
        argument_default=argparse.SUPPRESS,
    )
    about = "of the Ray cluster, HOST:PORT (default: RAY_ADDRESS)"
    command.add_argument("--address", metavar="HOST:PORT", help=about)
    about = "address of this node, where its host has several"
    command.add_argument("--node-ip", metavar="HOST", help=about)
    about = "when the node goes, its replicas are stopped in time for that (default: 60)"
    command.add_argument("--deadline", metavar="S", type=float, dest="deadline_s", help=about)
    about = "who goes first when the whole cluster goes: routers (for workers), all (for the head)"
    command.add_argument("--after", choices=("routers", "all"), help=about)
    about = "the longest wait for these (default: 600)"
    command.add_argument("--patience", metavar="S", type=float, dest="patience_s", help=about)


def _add_doctor(commands: Any) -> None:
    text = "look at this machine or pod, and say what to mend"
    command = commands.add_parser(
        "doctor",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. KV blocks are moved over each way that is here."
        " Exit status: 0 when nothing fails, 1 when something does, 2 for wrong use.",
    )
    about = "gpu, rdma or gpu,rdma: what is missing of these is a fault, not a note"
    command.add_argument("--need", metavar="WHAT", default="", help=about)
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    about = "YAML of the deployment, for its model, its ports and what it says of UCX"
    command.add_argument("--config", metavar="FILE", default="", help=about)


def _add_loadtest(commands: Any) -> None:
    text = "send requests to any OpenAI-compatible server, and report goodput under SLOs"
    run = commands.add_parser(
        "loadtest",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. `baton loadtest compare TARGET TARGET ...` runs"
        " several by turns; `baton loadtest report FOLDER` writes a report anew. docs/loadtest.md"
        " explains all of it.",
        argument_default=argparse.SUPPRESS,
    )
    run.set_defaults(what="run")
    what = run.add_subparsers(metavar="[compare|report]", required=False)
    text = "several targets by turns, in rounds: ratios with intervals"
    compare = what.add_parser(
        "compare", help=text, description=text, argument_default=argparse.SUPPRESS
    )
    compare.set_defaults(what="compare")
    compare.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="URL, NAME=URL, NAME=FILE.yaml or NAME='--mixed 1 --prefill 0 --decode 0': a running"
        " server, or a configuration of baton serve that is started and stopped",
    )
    _add_fields(compare.add_argument_group("comparison"), CompareOptions, typed=True)
    for command in (run, compare):
        but = ("url",) if command is compare else ()
        _add_fields(command.add_argument_group("server"), ServerOptions, but, typed=True)
        _add_fields(command.add_argument_group("workload"), WorkloadOptions, typed=True)
        _add_fields(command.add_argument_group("run and results"), RunOptions, typed=True)
    text = "write the report of a run anew, by other objectives if given"
    report = what.add_parser(
        "report", help=text, description=text, argument_default=argparse.SUPPRESS
    )
    report.set_defaults(what="report")
    report.add_argument("folder", metavar="FOLDER", help="of a run")
    report.add_argument("--slo", metavar="TEXT", help=field_notes(WorkloadOptions)["slo"])


def _add_profile(commands: Any) -> None:
    text = "time the steps of a deployment's workers on this machine, for its autoscaling"
    command = commands.add_parser(
        "profile",
        help=text,
        description=f"{text[0].upper()}{text[1:]}: each point, the time model that comes closest,"
        " and what one worker can do by it. Takes the flags of baton serve, wants an idle machine;"
        " docs/scaling.md explains what it finds.",
        argument_default=argparse.SUPPRESS,
    )
    _add_fields(command.add_argument_group("profile"), ProfileOptions, typed=True)
    _add_flags(command)


def _add_flags(command: argparse.ArgumentParser) -> None:
    """Flags that were not given are not in the result: defaults are the business of ``load``."""
    app = command.add_argument_group("deployment")
    app.add_argument(
        "--config",
        metavar="FILE",
        help="YAML with these keys and with blocks by role; flags win",
    )
    _add_fields(app, AppConfig)
    pools = command.add_argument_group("number of workers")
    for role in ROLES:
        default = getattr(AppConfig(), role).replicas
        text = f"{role} workers (default: {default})"
        if role != "mixed":
            text += "; 1..4: from one to four, as they are needed (docs/scaling.md)"
        pools.add_argument(f"--{role}", metavar="N" if role == "mixed" else "N|N..M", help=text)
    text = "set for all roles; blocks prefill:, decode: and mixed: in the YAML set them by role"
    workers = command.add_argument_group("workers", text)
    _add_fields(workers, WorkerConfig, but=("replicas",))
    _add_fields(workers, EngineConfig)
    # no --api-keys: everybody on the machine sees the flags of a process
    _add_fields(command.add_argument_group("router"), RouterConfig, but=("api_keys",))


def _add_fields(
    group: argparse._ArgumentGroup,
    cls: type[Any],
    but: tuple[str, ...] = (),
    typed: bool = False,  # argparse converts values; else that is left to ``load``
) -> None:
    notes, defaults = field_notes(cls), cls()
    for field in fields(cls):
        default = getattr(defaults, field.name)
        if is_dataclass(default) or field.name in but:
            continue
        name = field.name.removesuffix("_s") if typed else field.name
        flag = "--" + name.replace("_", "-")
        text = notes.get(field.name, "").replace("%", "%%")
        text += f" (default: {default})" if default != "" else ""
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, dest=field.name, action=action, help=text.strip())
        else:
            kind: Any = type(default) if typed else None
            metavar = _metavar(field.name, default)
            group.add_argument(flag, dest=field.name, metavar=metavar, type=kind, help=text.strip())


def _metavar(name: str, default: object) -> str:
    choices = LIMITS.get(name, Limit()).choices
    return "|".join(choices) or {int: "N", float: "X", str: "TEXT"}[type(default)]


def field_notes(cls: type) -> dict[str, str]:
    """The comment on each field of a dataclass, from its source."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for item in body.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            lines = range(item.lineno, (item.end_lineno or item.lineno) + 1)
            notes[item.target.id] = " ".join(comments[n] for n in lines if n in comments)
    return notes


if __name__ == "__main__":
    sys.exit(main())
