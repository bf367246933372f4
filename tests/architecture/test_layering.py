"""Imports point one way: services → router → kvtransfer, and heavy packages stay in named files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("kvtransfer", "router", "services", "loadtest")

ALLOWED = {
    "kvtransfer": {"kvtransfer"},
    "router": {
        "router",
        "kvtransfer.errors",
        "kvtransfer.faults",
        "kvtransfer.hashing",
        "kvtransfer.layout",
        "kvtransfer.ticket",
    },
    "services": {"services", "router", "kvtransfer", "loadtest"},
    "services.engine": {
        "services.engine",
        "kvtransfer.hashing",
        "kvtransfer.layout",
        "kvtransfer.region",
    },
    "loadtest": {"loadtest"},
}
"""Longest matching prefix of the importing module decides."""

HEAVY = {
    "ray": {f"services/{name}.py" for name in ("app", "leave", "own_ray", "registry")},
    "nixl": {"kvtransfer/nixl_agent.py"},
    "nixl_cu12": {"kvtransfer/nixl_agent.py"},
    "fastapi": {"router/api.py"},
    "opentelemetry": {"router/otlp.py"},
    "prometheus_client": {
        "router/exposition.py",
        "router/metrics.py",
        "router/scraping.py",
        "router/vllm_names.py",
        "services/metrics.py",
    },
    "numba": {
        f"services/engine/{name}.py"
        for name in (
            "attention_kernels",
            "compiled",
            "cpu_layers",
            "cpu_ops",
            "intrinsics",
            "kernels",
            "linear",
            "paged_attention",
            "sampler",
        )
    },
    "llvmlite": {"services/engine/intrinsics.py", "services/engine/kernels.py"},
    "transformers": set(),
    "grafana_foundation_sdk": {"services/dashboards/grafana.py"},
    "httptools": {"loadtest/http1.py"},
}

PURE = [
    "kvtransfer/hashing.py",
    "kvtransfer/layout.py",
    "kvtransfer/errors.py",
    "kvtransfer/exporter.py",
    "kvtransfer/importer.py",
    "kvtransfer/pull_events.py",
    "kvtransfer/verify.py",
    "kvtransfer/transport.py",
    "kvtransfer/ucx.py",
    "router/policy.py",
    "router/admission.py",
    "router/config.py",
    "router/leases.py",
    "router/buckets.py",
    "router/observation.py",
    "router/ledger.py",
    "router/pools.py",
    "services/engine/sequence.py",
    "services/engine/blocks.py",
    "services/engine/scheduler.py",
    "services/engine/engine.py",
    "services/engine/roofline.py",
    "services/engine/meter.py",
    "services/engine/config.py",
    "services/planner/config.py",
    "services/planner/demand.py",
    "services/planner/fit.py",
    "services/planner/halves.py",
    "services/planner/observation.py",
    "services/planner/planner.py",
    "services/planner/profile.py",
    "services/planner/reports.py",
    "services/planner/signals.py",
    "services/planner/words.py",
    "services/engine/model_config.py",
    "services/doctor/findings.py",
    *(
        f"services/dashboards/{name}.py"
        for name in (
            "board",
            "boards",
            "page",
            "pools",
            "promql",
            "roofline",
            "routing",
            "slo",
            "transfer",
        )
    ),
]
"""Decisions: the standard library only, and neither asyncio nor a clock of their own."""
NOT_PURE = {"asyncio", "threading", "time", "random", "socket", "os"}


def sources() -> list[Path]:
    return sorted(path for name in OURS for path in (ROOT / name).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports at run time, as ``a.b`` for ``from a.b import c``."""
    tree = ast.parse(path.read_text())
    type_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in type_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found.add(node.module)
    return found


def rule_for(module: str) -> set[str]:
    prefix = max((p for p in ALLOWED if f"{module}.".startswith(f"{p}.")), key=len)
    return ALLOWED[prefix]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for imported in imports(path):
        top = imported.split(".")[0]
        if top in OURS:
            allowed = rule_for(module)
            assert any(f"{imported}.".startswith(f"{a}.") for a in allowed), (
                f"{name} imports {imported}; allowed: {sorted(allowed)}"
            )
        if top in HEAVY:
            assert name in HEAVY[top], f"{name} imports {top}; only {sorted(HEAVY[top])} may"
        if top == "torch":
            assert not name.startswith(("router/", "loadtest/")), f"{name} imports torch"


@pytest.mark.parametrize("name", PURE)
def test_decisions_are_pure(name: str) -> None:
    for imported in imports(ROOT / name):
        top = imported.split(".")[0]
        assert top in sys.stdlib_module_names or top in OURS, f"{name} imports {imported}"
        assert top not in NOT_PURE, f"{name} imports {imported}"


def test_package_files_hold_a_docstring_only() -> None:
    packages = [path for path in sources() if path.name == "__init__.py"]
    assert len(packages) >= len(OURS)
    for path in packages:
        (statement,) = ast.parse(path.read_text()).body
        assert isinstance(statement, ast.Expr), path


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("services.cli", ["torch", "ray", "fastapi", "nixl", "grafana_foundation_sdk"]),
        ("router.api", ["torch", "ray", "nixl", "transformers", "opentelemetry.sdk", "requests"]),
        ("services.engine.engine", ["torch", "numpy"]),
        ("kvtransfer.exporter", ["torch", "numpy"]),
        ("kvtransfer.importer", ["torch", "numpy"]),
    ],
)
def test_heavy_packages_are_not_dragged_in(module: str, unwanted: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {unwanted!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_deploy_and_helm_hold_no_python() -> None:
    assert not [p for name in ("deploy", "helm") for p in (ROOT / name).rglob("*.py")]
