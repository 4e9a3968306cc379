"""Snapshots on disk: one safetensors file per rank, and a manifest that names them.

A checkpoint is a directory. Files of ranks carry a token of their save in their names, so that no save touches the
files of another; ``manifest.json`` is replaced in one rename, after they are on disk. A save that is killed at any
moment leaves the earlier checkpoint, and files that the next save removes. Nothing here communicates.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from gradcomp.core.errors import StateError
from gradcomp.core.state import Range
from gradcomp.pipeline.snapshot import Shared, Snapshot
from gradcomp.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"

_KIND = "gradcomp checkpoint"
_MOST_MANIFEST_BYTES = 1 << 28
_MOST_RANKS = 1 << 16
_FIRST = "first/"
_FIELD = "field/"
_CONTROL = "control/"
_NAME = re.compile(r"rank-\d{1,5}-of-\d{1,5}\.[0-9a-f]{16}\.safetensors")
_LEFTOVER = re.compile(_NAME.pattern + r"|manifest\.json\.partial")


@dataclass(frozen=True)
class File:
    """One rank's file, as the manifest knows it."""

    name: str
    nbytes: int
    sha256: str

    @staticmethod
    def from_plain(data: Any) -> File:
        """Inverse of ``asdict``; StateError for anything else, names outside of the directory above all."""
        if not isinstance(data, dict) or data.keys() != {"name", "nbytes", "sha256"}:
            raise StateError("the checkpoint's manifest does not name its files")
        name, nbytes, sha256 = data["name"], data["nbytes"], data["sha256"]
        sound = type(name) is str and _NAME.fullmatch(name) and type(nbytes) is int and 0 <= nbytes < 1 << 48
        if not sound or type(sha256) is not str or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise StateError(f"the checkpoint's manifest names an impossible file: {data!r:.200}")
        return File(name, nbytes, sha256)


@dataclass(frozen=True)
class Manifest:
    """What the ranks' states have in common, and where they are: ``files[i]`` is rank i's."""

    shared: Shared
    files: tuple[File, ...]

    def to_text(self) -> str:
        """JSON, with a digest of everything else in it."""
        body = {
            "kind": _KIND,
            "format": FORMAT,
            "gradcomp": __version__,
            "world": len(self.files),
            "shared": self.shared.to_plain(),
            "files": [asdict(file) for file in self.files],
        }
        return json.dumps({**body, "digest": _digest(body)}, indent=1)

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Inverse of :meth:`to_text`; StateError for anything else, another format included."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StateError(f"the checkpoint's manifest is damaged: {error}") from error
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise StateError(f"{MANIFEST} is not that of a gradcomp checkpoint")
        if body.get("format") != FORMAT:
            raise StateError(
                f"the checkpoint has format {body.get('format')!r:.40} (of gradcomp {body.get('gradcomp')!r:.40}), "
                f"this gradcomp reads format {FORMAT}"
            )
        digest = body.pop("digest", None)
        if digest != _digest(body):
            raise StateError("the checkpoint's manifest is damaged: it does not match its digest")
        files, world = body.get("files"), body.get("world")
        if not isinstance(files, list) or len(files) != world or not 1 <= len(files) <= _MOST_RANKS:
            raise StateError(
                f"the checkpoint's manifest does not name a file for each of {world!r:.40} ranks"
            )
        return Manifest(Shared.from_plain(body.get("shared")), tuple(File.from_plain(file) for file in files))


def write_rank(directory: Path, state: Snapshot, token: str) -> File:
    """Write one rank's part; on disk when this returns. ``token``: 16 hexadecimal digits, the same on all ranks."""
    tensors: dict[str, np.ndarray[Any, Any]] = {_FIRST + name: value for name, value in state.first.items()}
    for prefix, kinds in ((_FIELD, state.fields), (_CONTROL, state.control)):
        for kind, values in kinds.items():
            tensors |= {f"{prefix}{kind}/{name}": value for name, value in values.items()}
    tensors["second"] = state.second
    tensors["ranges"] = np.array([[r.layer, r.start, r.length] for r in state.ranges], np.int64).reshape(
        -1, 3
    )
    data = safetensors.numpy.save(tensors)
    file = File(
        f"rank-{state.rank}-of-{state.world}.{token}.safetensors", len(data), hashlib.sha256(data).hexdigest()
    )
    with _as_state_error(f"{file.name} cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / file.name, data)
        _sync(directory)
    return file


def read_rank(directory: Path, manifest: Manifest, rank: int) -> Snapshot:
    """Rank ``rank``'s part. StateError if the file is missing, or not the one that was written."""
    file = manifest.files[rank]
    with _as_state_error(f"{file.name} cannot be read"), (directory / file.name).open("rb") as stream:
        data = stream.read(file.nbytes + 1)
    if len(data) != file.nbytes:
        raise StateError(f"{file.name} does not have the {file.nbytes} bytes that were written")
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise StateError(f"{file.name} is damaged: it does not match its checksum")
    try:
        tensors = safetensors.numpy.load(data)
        second, table = tensors.pop("second"), tensors.pop("ranges")
        if second.ndim != 1 or table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 3:
            raise ValueError(f"second residuals of shape {second.shape}, ranges of shape {table.shape}")
        fields, control = _by_kind(tensors, _FIELD), _by_kind(tensors, _CONTROL)
        if not all(name.startswith(_FIRST) for name in tensors):
            raise ValueError(f"unknown tensors among {sorted(tensors)[:5]}")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{file.name} does not hold a rank's state: {error}") from error
    return Snapshot(
        rank,
        len(manifest.files),
        manifest.shared,
        {name.removeprefix(_FIRST): value for name, value in tensors.items()},
        tuple(Range(*row) for row in table.tolist()),
        second,
        fields,
        control,
    )


def _by_kind(
    tensors: dict[str, np.ndarray[Any, Any]], prefix: str
) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Take ``prefix kind / layer`` out of the tensors: kind -> layer -> values."""
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name in [name for name in tensors if name.startswith(prefix)]:
        kind, _, layer = name.removeprefix(prefix).partition("/")
        found.setdefault(kind, {})[layer] = tensors.pop(name)
    return found


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Make this the checkpoint in the directory, all at once."""
    partial = directory / (MANIFEST + ".partial")
    with _as_state_error(f"{MANIFEST} cannot be written"):
        _write(partial, manifest.to_text().encode())
        partial.replace(directory / MANIFEST)
        _sync(directory)


def read_manifest(directory: Path) -> str:
    """The manifest's text. StateError if there is none."""
    path = directory / MANIFEST
    if not path.is_file():
        raise StateError(f"there is no checkpoint in {directory}: it has no {MANIFEST}")
    with _as_state_error(f"{MANIFEST} cannot be read"), path.open("rb") as stream:
        data = stream.read(_MOST_MANIFEST_BYTES + 1)
    if len(data) > _MOST_MANIFEST_BYTES:
        raise StateError(f"{path} is too large for a manifest")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StateError(f"the checkpoint's manifest is damaged: {error}") from error


def remove_others(directory: Path, keep: Collection[str]) -> None:
    """Remove files of earlier and of killed saves. One that cannot be removed harms nobody."""
    with suppress(OSError):
        for path in list(directory.iterdir()):
            if _LEFTOVER.fullmatch(path.name) and path.name not in keep:
                path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    """Make names durable, not only contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _as_state_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"{what}: {error}") from error


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
