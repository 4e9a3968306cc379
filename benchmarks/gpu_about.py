"""What a GPU is, and which versions work with it: `python benchmarks/gpu_about.py [--json PATH]`.

With `--probe` one line: its name, or why there is none. Exit status 0, or 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

#: Of cudaGetDeviceProperties, what speed and memory depend on.
PROPERTIES = (
    "totalGlobalMem",
    "multiProcessorCount",
    "l2CacheSize",
    "memoryBusWidth",
    "sharedMemPerMultiprocessor",
    "concurrentManagedAccess",
    "pageableMemoryAccess",
    "ECCEnabled",
)
PACKAGES = ("torch", "numpy", "ml_dtypes", "safetensors", "pytest", "hypothesis")


def probe() -> tuple[int, str]:
    """0 and the GPU's name, or 2 and what is missing."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        return 2, f"CuPy cannot be imported ({error})"
    try:
        if not runtime.getDeviceCount():
            return 2, "no CUDA device"
        name = runtime.getDeviceProperties(0)["name"]
    except runtime.CUDARuntimeError as error:
        return 2, f"no CUDA device ({error})"
    return 0, name.decode() if isinstance(name, bytes) else str(name)


def about() -> dict[str, Any]:
    """Versions and properties; what cannot be asked is named with the reason."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    free, total = runtime.memGetInfo()
    return {
        "GPU": probe()[1],
        "compute capability": f"{properties['major']}.{properties['minor']}",
        **{name: properties.get(name) for name in PROPERTIES},
        "devices": runtime.getDeviceCount(),
        "free bytes": free,
        "total bytes": total,
        "CUDA of the driver": runtime.driverGetVersion(),
        "CUDA runtime of CuPy": runtime.runtimeGetVersion(),
        "NVRTC": _asked(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion()))),
        "NCCL of CuPy": _asked(lambda: importlib.import_module("cupy.cuda.nccl").get_version()),
        "CuPy": cupy.__version__,
        "CUDA of torch, and whether it sees a GPU": _asked(_torch),
        **{name: _version(name) for name in PACKAGES},
        "compiled module": importlib.util.find_spec("gradcomp._native") is not None,
        "compute-sanitizer": shutil.which("compute-sanitizer"),
        "nvidia-smi": _asked(_management),
    }


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"unknown: {type(error).__name__}: {error}"


def _torch() -> str:
    import torch

    return f"{torch.version.cuda}, {torch.cuda.is_available()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _management() -> str:
    fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current,compute_mode"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=8,
        check=True,
    )
    return f"{fields}: {done.stdout.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probe", action="store_true", help="only say whether there is one")
    parser.add_argument("--json", type=Path, help="also write it here")
    options = parser.parse_args()
    code, text = probe()
    if options.probe or code:
        print(text)
        return code
    found = report.machine() | about()
    for name, value in found.items():
        print(f"{name}: {value}")
    report.write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
