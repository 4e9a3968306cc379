"""The compiled module: the one beside this package, or, for a source tree, that of the installed package.

A script that starts in a clone's root imports the source tree, which has no compiled module. That of the installed
package serves it if both come from the same C++ sources: the module knows a digest of those that it was built from.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

NAME: Final = "gradcomp._native"
_ROOT: Final = Path(__file__).resolve().parents[2]


def load(root: Path = _ROOT) -> tuple[ModuleType | None, str]:
    """Returns the compiled module and ""; where this package has none, None, and why and what to do about it.

    ``root`` is the folder of this package, which in a source tree has ``native/`` too. A module that is there but
    broken raises ImportError.
    """
    # Absent is a choice of the build; present but broken must not pass for absent.
    if importlib.util.find_spec(NAME) is not None:
        return importlib.import_module(NAME), ""
    if NAME in sys.modules or not (root / "native").is_dir():
        return None, ""
    spec = PathFinder.find_spec(NAME, [str(Path(each) / "gradcomp") for each in sys.path])
    if spec is None or spec.loader is None:
        return None, (
            f"Python imports the source tree {root}, which has no compiled module, and no gradcomp is installed: "
            f"run pip install {root}"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]  # else the next import would return the broken module
        raise
    if getattr(module, "sources_digest", str)() == digest(root):
        return module, ""
    del sys.modules[NAME]
    installed = Path(str(spec.origin)).parent
    return None, (
        f"Python imports the source tree {root} instead of the installed {installed}, "
        f"which was built from other C++ sources: run pip install {root}, or start the script from another directory"
    )


def digest(root: Path) -> str:
    """Returns SHA-256 over names and contents of CMakeLists.txt and the C++ sources, as CMakeLists.txt computes it."""
    native = root / "native"
    sources = [each for each in native.rglob("*") if each.suffix in (".cpp", ".hpp")]
    names = sorted(each.relative_to(root).as_posix() for each in [root / "CMakeLists.txt", *sources])
    lines = (f"{hashlib.sha256((root / name).read_bytes()).hexdigest()} {name}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
