"""The stages of benchmarks/gpu_hour.py: what runs, in which order, in which piece, for how long at most."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).resolve().parent

#: A piece may be all that a machine is lent for at a time: ten minutes, with its start.
PIECES = (1, 2, 3)
PIECE_SECONDS = 590
#: For the question whether there is a GPU, with which every piece begins.
PROBE_SECONDS = 20


@dataclass(frozen=True)
class Stage:
    """One row of the result. ``{json}`` in ``command``: a file to which it writes figures.

    ``tests``: it is a run of pytest, which passes only if a test passed. ``needs``: a program without which the stage
    is skipped.
    """

    name: str
    title: str
    piece: int
    limit_seconds: int
    command: tuple[str, ...]
    tests: bool = False
    needs: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def _script(
    name: str, title: str, piece: int, seconds: int, script: str, *arguments: str, needs: str = ""
) -> Stage:
    return Stage(name, title, piece, seconds, (sys.executable, str(_HERE / script), *arguments), needs=needs)


_PYTEST = (sys.executable, "-m", "pytest", "--full", "-q", "-rs", "-p", "no:cacheprovider")


def _tests(name: str, title: str, piece: int, seconds: int, *arguments: str) -> Stage:
    # Where pytest-timeout is installed, a test that hangs ends before the stage does, and its place is in the output.
    timeout = ("-o", f"timeout={seconds - 10}")
    return Stage(name, title, piece, seconds, (*_PYTEST, *timeout, *arguments), tests=True)


#: A few rows of every kind of kernel, in tables small enough for a tool that slows them down a hundredfold.
_CHOSEN = "tests/gpu/test_parity.py"
_ROWS = (
    "(test_random_tables and 1-stochastic and (minmax or onebit or sign or codebook-l2)) or (test_selections and 1)"
    " or (test_what_follows_the_last_reply_of_low_rank and 4-0)"
)


def _sanitized(tool: str, piece: int, seconds: int, title: str) -> Stage:
    command = (
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        *_PYTEST,
        "-o",
        "timeout=0",
        _CHOSEN,
        "-k",
        _ROWS,
    )
    return Stage(tool, title, piece, seconds, command, tests=True, needs="compute-sanitizer")


def _modules(name: str, piece: int, seconds: int) -> Stage:
    # A fresh machine builds what was not brought; where all is built, loading takes seconds.
    title = "every module of kernels is built or found, and loads"
    return _script(name, title, piece, seconds, "gpu_modules.py", "--json", "{json}")


def _bars(megabytes: int, piece: int, seconds: int) -> Stage:
    arguments = ("--megabytes", str(megabytes), "--rounds", "20", "--json", "{json}")
    return _script(f"bars-{megabytes}", f"kernels at {megabytes} MB", piece, seconds, "gpu.py", *arguments)


def _use(name: str, piece: int, runs: int, seconds_of_each: int, title: str) -> Stage:
    seconds = runs * seconds_of_each + 10
    arguments = (name, "--seconds", str(seconds_of_each), "--json", "{json}")
    return _script(name, title, piece, seconds, "gpu_uses.py", *arguments)


#: First what all else rests on, and the figures that decide what comes next; last what may be left out.
STAGES = (
    _script("versions", "versions and properties", 1, 15, "gpu_about.py", "--json", "{json}"),
    _modules("modules", 1, 60),
    _tests("driver", "streams, memory, devices", 1, 30, "tests/gpu/test_driver.py"),
    _tests("parity", "kernels give the bytes of the reference", 1, 130, "tests/gpu/test_parity.py"),
    _bars(256, 1, 90),
    _script(
        "step",
        "step of a GPT of 124 M parameters",
        1,
        110,
        "gpu_step.py",
        "--json",
        "{json}",
        "--seconds",
        "35",
    ),
    _tests("pipeline", "whole steps give the bytes of the host", 1, 55, "tests/gpu/test_pipeline.py"),
    _tests("training", "two ranks on one GPU hold the same parameters", 1, 80, "tests/gpu/test_training.py"),
    _modules("modules-2", 2, 30),
    _script(
        *("curves", "losses beside a CPU's and beside uncompressed ones", 2, 80, "gpu_training.py"),
        *("--seconds", "70", "--json", "{json}"),
    ),
    _tests(
        *("side-stream", "a backward pass on a side stream", 2, 35, "tests/gpu/test_streams.py"),
        *("-k", "side_stream and optimizer"),
    ),
    _tests(
        *("hook-stream", "the DDP hook on a side stream", 2, 35, "tests/gpu/test_streams.py"),
        *("-k", "side_stream and hook"),
    ),
    _tests(
        *("scalars", "a GradScaler and a rate on the device: backward waits for neither", 2, 35),
        *("tests/gpu/test_streams.py", "-k", "backward_waits"),
    ),
    _tests("device-assert", "a device assert raises on all ranks", 2, 45, "tests/gpu/test_device_assert.py"),
    _tests("capture", "capture in a CUDA graph is refused", 2, 30, "tests/gpu/test_capture.py"),
    _tests("full-cache", "torch's cache holds all memory", 2, 45, "tests/gpu/test_full_cache.py"),
    _tests("nccl", "NCCL in a world of one", 2, 40, "tests/gpu/test_nccl.py"),
    _sanitized("memcheck", 2, 45, "no access outside of memory"),
    _sanitized("racecheck", 2, 40, "no race in shared memory"),
    _sanitized("synccheck", 2, 30, "no barrier that some threads miss"),
    _script(
        *(
            "profile",
            "counters of the bars' kernels, one call of each",
            2,
            70,
            "gpu_profile.py",
            "--json",
            "{json}",
        ),
        needs="ncu",
    ),
    _modules("modules-3", 3, 30),
    _bars(512, 3, 100),
    _use("without-cupy", 3, 3, 25, "over NVIDIA's bindings, and by the CPU's kernels"),
    _use("compile", 3, 2, 45, "torch.compile of the model"),
    _use("fsdp", 3, 3, 30, "compress_fsdp on the GPU, coded on the host"),
)
