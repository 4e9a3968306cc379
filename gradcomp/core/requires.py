"""What a frontend needs and the core does not: said before an import fails in the midst of it."""

from __future__ import annotations

from importlib.util import find_spec


def need(package: str, extra: str, *modules: str) -> None:
    """ModuleNotFoundError that names the extra to install, if one of the modules is not there."""
    for module in modules:
        if not _is_there(module):
            raise ModuleNotFoundError(
                f"{package} needs {module}, which is not installed: pip install 'gradcomp[{extra}]'",
                name=module,
            )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a finder hides it; a stand-in without a spec
        return False
