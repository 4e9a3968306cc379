"""One directory holds several checkpoints, each in a subdirectory; the last is found, and others are removed.

The names are ``<number>.<token>``. Numbers count the saves. Tokens keep a save apart from what a killed one left
under the same number. A directory without a manifest is an unfinished save. Nothing here communicates.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from gradcomp.core.errors import StateError
from gradcomp.exchange.checkpoint import FILE_NAME, MANIFEST, PARTIAL, as_state_error, is_checkpoint

#: The name of a checkpoint in the directory itself, as format 1 wrote it.
ITSELF = "."

_NAME = re.compile(r"\d{8,18}\.[0-9a-f]{16}")
_OLD_FILE_NAME = re.compile(r"rank-\d{1,5}-of-\d{1,5}\.[0-9a-f]{16}\.safetensors")


def is_name(name: object) -> bool:
    """Return whether a checkpoint can have this name: one outside of the directory cannot."""
    return type(name) is str and (name == ITSELF or _NAME.fullmatch(name) is not None)


def complete(directory: Path) -> list[str]:
    """Return the names of the complete checkpoints, the last one at the end."""
    own = [ITSELF] if (directory / MANIFEST).is_file() else []
    return own + [name for name in _saves(directory) if (directory / name / MANIFEST).is_file()]


def last(directory: Path) -> str:
    """Return the name of the last complete checkpoint; raise StateError if there is none."""
    names = complete(directory)
    if not names:
        unfinished = len(_saves(directory))
        raise StateError(
            f"there is no checkpoint in {directory}: it has no {MANIFEST}"
            + (f", only {unfinished} unfinished saves" if unfinished else "")
        )
    return names[-1]


def new_name(directory: Path) -> str:
    """Return a name for the next checkpoint."""
    numbers = [int(name.partition(".")[0]) for name in _saves(directory)]
    return f"{max(numbers, default=0) + 1:08d}.{secrets.token_hex(8)}"


def remove_others(directory: Path, keep: Collection[str]) -> None:
    """Remove all checkpoints and unfinished saves but ``keep``; ignore what cannot be removed."""
    with suppress(StateError):
        for name in _saves(directory):
            if name not in keep:
                _remove(directory / name, FILE_NAME)
                with suppress(OSError):
                    (directory / name).rmdir()
    # The directory itself is the user's: only files that format 1 wrote are removed from it.
    if ITSELF not in keep and (not (directory / MANIFEST).exists() or is_checkpoint(directory)):
        _remove(directory, _OLD_FILE_NAME)


def _saves(directory: Path) -> list[str]:
    """Return the names of all saves in order, finished or not."""
    with as_state_error(f"{directory} cannot be read"):
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(filter(_NAME.fullmatch, names), key=lambda name: (int(name.partition(".")[0]), name))


def _remove(directory: Path, names: re.Pattern[str]) -> None:
    """Remove a checkpoint, its manifest first: what a killed removal leaves is then no checkpoint."""
    with suppress(OSError):
        (directory / MANIFEST).unlink(missing_ok=True)
        for path in list(directory.iterdir()):
            if names.fullmatch(path.name) or path.name == PARTIAL:
                path.unlink(missing_ok=True)
