"""Checks for the modules that a frontend needs besides the core, before its imports fail."""

from __future__ import annotations

from importlib.util import find_spec


def need(package: str, extra: str, *modules: str) -> None:
    """Raises ModuleNotFoundError that names the extra to install, if one of the modules is missing."""
    for module in modules:
        if not _is_there(module):
            raise ModuleNotFoundError(
                f"{package} needs {module}, which is not installed: pip install 'gradcomp[{extra}]'",
                name=module,
            )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a finder hides the module, or a mock has no spec
        return False
