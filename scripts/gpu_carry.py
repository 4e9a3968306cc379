"""Build what a GPU machine without a network lacks, into the source tree: make gpu-carry.

    python scripts/gpu_carry.py [--architectures 90] [--out build/gpu-carry]

Two paths come of it, both ignored by git: gradcomp/_native.abi3.so, the compiled module for CPython 3.12 and newer, and
gradcomp/kernels/cuda/cubins, the kernels' code. Neither needs a GPU here. The C++ sources decide whether the module is
used, and the CUDA sources whether a file of code is: build both behind the last change of them.

The interpreter is a CPython 3.12 or newer, from PATH or from pyenv. The exit status is 1 without one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import interpreters
from wheels import ROOT, run

#: The first of them that is here: the stable ABI that the module is built for serves all.
VERSIONS = ("3.12", "3.13", "3.14")
MODULE = "gradcomp/_native.abi3.so"
CODE = "gradcomp/kernels/cuda/cubins"

#: That the module loads, and that it was built from the sources beside it.
_CHECK = (
    "import sys; from pathlib import Path; from gradcomp.kernels import dispatch; module, reason = dispatch.load(); "
    "assert module is not None, reason; assert module.sources_digest() == dispatch.digest(Path(sys.argv[1])), 'old'"
)


def environment(interpreter: Path, folder: Path) -> Path:
    """The Python that builds: what the build asks for, what the package imports, and NVRTC."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["cubins"],
    ]
    return interpreters.environment(interpreter, folder, "cmake>=3.26", "ninja>=1.11", *needed)


def module(python: Path, work: Path, target: Path) -> None:
    """Build the compiled module; it takes the place of an older one as a whole."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(
        *(python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", raw),
        *("--config-settings", f"build-dir={work / 'cmake'}", ROOT),
        environment={**os.environ, "PATH": path},
    )
    (wheel,) = raw.glob("*.whl")
    place(wheel, target)


def place(wheel: Path, target: Path) -> None:
    """Take the module out of a wheel; SystemExit if that is for one version of Python alone."""
    with zipfile.ZipFile(wheel) as archive:
        if MODULE not in archive.namelist():
            raise SystemExit(f"{wheel.name} has no {MODULE}")
        part = target.with_name(f"{target.name}.part")
        part.write_bytes(archive.read(MODULE))
    part.chmod(0o755)
    part.replace(target)


def glibc(code: bytes) -> str:
    """The oldest glibc that a compiled file runs with."""
    found = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", code)}
    return ".".join(map(str, max(found, default=(0, 0))))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures", nargs="+", default=["90"], help="compute capabilities: 90 for 9.0 (default: 90)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu-carry", help="for what is built on the way"
    )
    options = parser.parse_args()
    interpreter = next(filter(None, map(interpreters.find, VERSIONS)), None)
    if interpreter is None:
        print(f"there is no CPython {' or '.join(VERSIONS)} here", file=sys.stderr)
        return 1
    work = options.out.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = environment(interpreter, work / "tools")
    module(python, work, ROOT / MODULE)
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    run(python, "-c", _CHECK, ROOT, environment=variables)
    built = run(
        *(python, "-m", "gradcomp.kernels.cuda.cubins", "--architectures", *options.architectures),
        environment=variables,
    )
    print(built.strip().splitlines()[-1])
    code = (ROOT / MODULE).read_bytes()
    print(f"{MODULE}: {len(code) / 1e6:.1f} MB, for CPython 3.12 and newer, glibc {glibc(code)} and newer")
    print(f"bring these paths, which git ignores, beside the tree: {MODULE} {CODE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
