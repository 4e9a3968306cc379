"""Tests whose body runs on every rank of a job, many of them in one launch.

    @on_ranks(2)
    def test_something():  # this body runs on both ranks
        assert ...

The tests of a module with the same world (and batch) share a launch: each rank runs their bodies in order, inside one
``gradcomp.torch.init()``. Where PyTorch is not installed they meet through MPI, under TensorFlow alone. A body that
fails on some ranks only ends the launch, for the ranks no longer agree where they are; the tests behind it then fail
too and name it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
from launching import run_ranks

#: For ranks that have no GPU, and for what ranks do on the host, where the compiled module may be missing.
HOST_KERNELS = {} if importlib.util.find_spec("gradcomp._native") else {"GRADCOMP_KERNELS": "reference"}

#: How long ranks wait for each other between two bodies.
_MEETING_SECONDS = 60.0

_launched: dict[tuple[str, int, str], dict[str, str]] = {}
_settings: dict[tuple[str, int, str], Any] = {}


def on_ranks(
    world: int, batch: str = "", *, env: dict[str, str] | None = None, **settings: Any
) -> Callable[..., Any]:
    """Run the decorated function on ``world`` ranks; settings, one set per batch, go to ``init``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, **_: Any) -> None:
            verdict = _verdicts(request, world, batch, env, settings)[request.node.name]
            if verdict:
                pytest.fail(verdict, pytrace=False)

        of_batch = _settings.setdefault((body.__module__, world, batch), (env, settings))
        assert of_batch == (env, settings), f"{body.__name__}: batch {batch!r} has other settings"
        own = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *inspect.signature(body).parameters.values()])
        test.batch = (world, batch)
        return test

    return decorate


#: For the tests under tests/gpu.
on_two_ranks = functools.partial(on_ranks, 2, env=HOST_KERNELS)


def _verdicts(
    request: pytest.FixtureRequest,
    world: int,
    batch: str,
    env: dict[str, str] | None,
    settings: dict[str, Any],
) -> dict[str, str]:
    """By test name: what went wrong on any rank, or nothing."""
    path = str(request.node.path)
    key = (path, world, batch)
    if key not in _launched:
        items = [
            item
            for item in request.session.items
            if str(item.path) == path and getattr(item.function, "batch", None) == (world, batch)
        ]
        calls = [
            (item.name, item.function.__name__, getattr(getattr(item, "callspec", None), "params", {}))
            for item in items
        ]
        _launched[key] = _launch(path, world, calls, env or {}, settings)
    return _launched[key]


def _launch(
    path: str, world: int, calls: list[Any], env: dict[str, str], settings: dict[str, Any]
) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="gradcomp-batch-") as directory:
        work = json.dumps({"path": path, "calls": calls, "directory": directory, "settings": settings})
        source = f"import batch\nbatch.work({work!r})\n"
        variables = (lambda _: env) if world == 1 else env
        if preloaded.HAS_TORCH:
            finished = run_ranks(source, world, env=variables, timeout=280, imported=_imported(Path(path)))
        else:
            from transport_engines import under_mpiexec

            finished = [under_mpiexec(source, world, env, imported=_imported(Path(path)))] * world
        verdicts = {}
        before = ""
        for number, (name, _, _) in enumerate(calls):
            texts = []
            for rank, end in enumerate(finished):
                file = Path(directory) / f"{number}.{rank}"
                text = (
                    file.read_text()
                    if file.exists()
                    else f"no verdict (exit {end.returncode})\n{end.stderr[-3000:]}"
                )
                if text:
                    texts.append(f"rank {rank}: {text}")
            reached = any((Path(directory) / f"{number}.{rank}").exists() for rank in range(world))
            verdicts[name] = "\n".join(texts) if reached or not before else f"not run: {before} failed"
            before = name if texts and reached else before
        bad = [
            f"rank {r} ended with {e.returncode}\n{e.stderr[-3000:]}"
            for r, e in enumerate(finished)
            if e.returncode
        ]
        if bad and not before:
            verdicts = {name: "\n".join(bad) for name, _, _ in calls}
        return verdicts


def _imported(path: Path) -> tuple[str, ...]:
    """What the bodies of a file import, but not where a GPU's libraries may be loaded."""
    return {"tf": preloaded.TENSORFLOW, "gpu": ()}.get(path.parent.name, preloaded.TORCH)


# ------------------------------------------------------------------------------------------ on a rank


def work(text: str) -> None:
    """What a rank does."""
    gc: Any = importlib.import_module("gradcomp.torch" if preloaded.HAS_TORCH else "gradcomp.tf")
    task = json.loads(text)
    spec = importlib.util.spec_from_file_location("bodies", task["path"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bodies"] = module
    spec.loader.exec_module(module)
    gc.init(**{"timeout_seconds": 20.0, "log_level": "warning", **task["settings"]})
    rank, world = gc.rank(), gc.size()
    for number, (_, function, arguments) in enumerate(task["calls"]):
        verdict = ""
        try:
            getattr(module, function).__wrapped__(**arguments)
        except BaseException:  # noqa: BLE001 - the verdict is the test's
            verdict = traceback.format_exc()
        if not _all_agree(Path(task["directory"]), number, rank, world, verdict):
            os._exit(0)  # an orderly end is not to be had
    gc.shutdown()


def _all_agree(directory: Path, number: int, rank: int, world: int, verdict: str) -> bool:
    partial = directory / f"{number}.{rank}.partial"
    partial.write_text(verdict)
    partial.rename(directory / f"{number}.{rank}")
    deadline = time.monotonic() + _MEETING_SECONDS
    failed = []
    for other in range(world):
        file = directory / f"{number}.{other}"
        while not file.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        failed.append(bool(file.read_text()))
    return all(failed) or not any(failed)
