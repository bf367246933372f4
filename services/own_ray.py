"""A Ray of our own on this host, for ``baton serve``: start, deploy, look, stop.

The application that runs on it is that of a cluster, :mod:`services.app`.
"""

import asyncio
import contextlib
import re
import threading
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from router import wire
from services.app import APP_NAME, LAST_WORDS_S, AppSpec, build
from services.registry import NAMESPACE, RegistryClient

FAILED_START = "A replica failed to start with exception"  # as Serve says it while it tries again


def start_ray(folder: Path) -> None:
    """A Ray of our own whose files lie in ``folder``; never joins one that runs already."""
    ray.init(
        address="local",
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # nothing of ours goes through it; 75 MiB is Ray's least
        log_to_driver=False,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
    )


def deploy(spec: AppSpec) -> None:
    """Start Serve and the application, without waiting until it runs."""
    config = spec.config
    serve.start("HeadOnly", HTTPOptions(host=config.host, port=config.port))
    target = serve.RunTarget(build(spec), name=APP_NAME)
    serve.run_many(
        [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def failure() -> str | None:
    """Why the application cannot start, if so: Serve would try again, and the user would wait."""
    app = serve.status().applications.get(APP_NAME)
    if app is None:
        return None
    for name, deployment in app.deployments.items():
        if deployment.status == "DEPLOY_FAILED" or FAILED_START in deployment.message:
            return f"{name} does not start: {root_cause(deployment.message)}"
    return app.message if app.status == ApplicationStatus.DEPLOY_FAILED else None


def root_cause(message: str) -> str:
    """What one of our own exceptions says at the end of a traceback, else all of the traceback."""
    own = list(re.finditer(r"^(?:kvtransfer|router|services)(?:\.\w+)+: ", message, re.MULTILINE))
    return message[own[-1].end() :].strip() if own else message


def reports(spec: AppSpec) -> list[tuple[wire.WorkerCard, wire.Load]]:
    """Card and load of each worker."""
    return asyncio.run(RegistryClient(spec.registry).reports())


def stop_ray(patience_s: float, spec: AppSpec | None = None) -> None:
    """Let requests end for at most ``patience_s``, then end the application and Ray."""
    if not ray.is_initialized():
        return
    if spec is not None:
        asyncio.run(RegistryClient(spec.registry).stop(patience_s))
    stop = threading.Thread(target=_stop_serve, daemon=True)
    stop.start()
    stop.join(patience_s + LAST_WORDS_S)
    ray.shutdown()


def _stop_serve() -> None:
    # The application first: routers and workers drain behind a living ingress. Serve's shutdown
    # alone would end HAProxy at once, and every stream with it.
    shutdown: Any = serve.shutdown
    with contextlib.suppress(RayServeException):  # Serve had not started yet
        serve.delete(APP_NAME)
    shutdown()
