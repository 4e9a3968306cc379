"""A checkpoint is a directory with a safetensors file per rank, further files and a manifest that names them.

``manifest.json`` is renamed into place last, after all that it names is on disk: without it there is no checkpoint.

One directory holds several checkpoints, each in a subdirectory ``<number>.<token>``. Numbers count the saves. Tokens
keep a save apart from what a killed one left under the same number. A directory without a manifest is an unfinished
save. Nothing here communicates.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from gradcomp.core.errors import StateError
from gradcomp.core.state import Range
from gradcomp.exchange.fingerprint import Digests
from gradcomp.exchange.snapshot import Shared, Snapshot
from gradcomp.version import __version__

FORMAT = 2
#: Formats that this version reads. Format 1 had compression state only; its file names had 16 random hex digits.
READABLE = (1, 2)
MANIFEST = "manifest.json"
PARTIAL = MANIFEST + ".partial"

_KIND = "gradcomp checkpoint"
_MOST_MANIFEST_BYTES = 1 << 28
_MOST_RANKS = 1 << 16
#: Prefixes of tensor names in a rank's file: residuals, further state of compressors, and state of the controller.
#: "second" has the server-side errors, "ranges" the elements that they belong to.
_FIRST = "first/"
_FIELD = "field/"
_CONTROL = "control/"
#: The file names that a manifest may contain.
FILE_NAME = re.compile(
    r"rank-\d{1,5}-of-\d{1,5}(\.[0-9a-f]{16})?\.safetensors|model\.pt|extra-\d{1,5}-of-\d{1,5}\.pt"
)
#: The name of a checkpoint in the directory itself, as format 1 wrote it.
ITSELF = "."

_NAME = re.compile(r"\d{8,18}\.[0-9a-f]{16}")
_OLD_FILE_NAME = re.compile(r"rank-\d{1,5}-of-\d{1,5}\.[0-9a-f]{16}\.safetensors")


class Sink:
    """Writes a file, and counts and hashes its bytes on the way.

    :meth:`write` does not raise, because an exception might crash the library that calls it; :meth:`end` raises the
    error, as of a full disk.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self._nbytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._error is None:
            try:
                self._stream.write(view)
            except OSError as error:
                self._error = error
            self._hash.update(view)
            self._nbytes += view.nbytes
        return view.nbytes

    @property
    def path(self) -> Path:
        return Path(self._stream.name)

    def flush(self) -> bool:
        """Make the file readable up to here; return False if that fails, and let :meth:`end` raise the error."""
        try:
            self._stream.flush()
        except OSError as error:
            self._error = self._error or error
        return self._error is None

    def end(self, name: str) -> File:
        """Sync the file to disk and return its entry; raise the OSError of any earlier failure."""
        self.flush()
        if self._error is not None:
            raise self._error
        os.fsync(self._stream.fileno())
        return File(name, self._nbytes, self._hash.hexdigest())


#: Writes a file's contents into a sink.
Writer = Callable[[Sink], object]


@dataclass(frozen=True)
class File:
    """Names a file, its size and its checksum, as the manifest does."""

    name: str
    nbytes: int
    sha256: str

    @staticmethod
    def from_plain(data: Any) -> File:
        """Invert ``asdict``; raise StateError for anything else, and for names that are not :data:`FILE_NAME`."""
        if not isinstance(data, dict) or data.keys() != {"name", "nbytes", "sha256"}:
            raise StateError(f"the checkpoint's manifest has a malformed file entry: {data!r:.200}")
        name, nbytes, sha256 = data["name"], data["nbytes"], data["sha256"]
        sound = (
            type(name) is str and FILE_NAME.fullmatch(name) and type(nbytes) is int and 0 <= nbytes < 1 << 48
        )
        if not sound or type(sha256) is not str or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise StateError(f"the checkpoint's manifest names an impossible file: {data!r:.200}")
        return File(name, nbytes, sha256)


@dataclass(frozen=True)
class Manifest:
    """Holds what the ranks' states have in common, and the entries of all files: ``files[i]`` is rank i's.

    ``parts`` lists all other files, such as ``model.pt``. ``parameters`` has digests of the model's parameters
    when it was saved; None if the model was not known.
    """

    shared: Shared
    files: tuple[File, ...]
    parts: tuple[File, ...] = ()
    parameters: Digests | None = None

    def to_text(self) -> str:
        """Return JSON that includes a digest of everything else in it."""
        body = {
            "kind": _KIND,
            "format": FORMAT,
            "gradcomp": __version__,
            "world": len(self.files),
            "shared": self.shared.to_plain(),
            "files": [asdict(file) for file in self.files],
            "parts": [asdict(file) for file in self.parts],
            "parameters": None if self.parameters is None else self.parameters.to_plain(),
        }
        return json.dumps({**body, "digest": _digest(body)}, indent=1)

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Invert :meth:`to_text`; raise StateError for anything else, including another format."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StateError(f"the checkpoint's manifest is damaged: {error}") from error
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise StateError(f"{MANIFEST} is not that of a gradcomp checkpoint")
        if body.get("format") not in READABLE:
            raise StateError(
                f"the checkpoint has format {body.get('format')!r:.40} (of gradcomp {body.get('gradcomp')!r:.40}), "
                f"this gradcomp {__version__} reads formats {READABLE[0]} to {READABLE[-1]}: load it with the version "
                "that wrote it"
            )
        digest = body.pop("digest", None)
        if digest != _digest(body):
            raise StateError("the checkpoint's manifest is damaged: it does not match its digest")
        files, world = body.get("files"), body.get("world")
        if not isinstance(files, list) or len(files) != world or not 1 <= len(files) <= _MOST_RANKS:
            raise StateError(
                f"the checkpoint's manifest does not name a file for each of {world!r:.40} ranks"
            )
        parts, parameters = body.get("parts", []), body.get("parameters")  # format 1 has neither
        if not isinstance(parts, list):
            raise StateError("the checkpoint's manifest does not name its files")
        return Manifest(
            Shared.from_plain(body.get("shared")),
            tuple(File.from_plain(file) for file in files),
            tuple(File.from_plain(file) for file in parts),
            None if parameters is None else Digests.from_plain(parameters),
        )

    def part(self, name: str) -> File | None:
        """Return the further file of this name, or None."""
        return next((file for file in self.parts if file.name == name), None)


def write_files(directory: Path, writers: Mapping[str, Writer]) -> tuple[File, ...]:
    """Write files into the directory and sync them and their directory entries; StateError if that fails."""
    files = []
    with as_state_error(f"{directory} cannot be made"):
        _make(directory)
    for name, writer in writers.items():
        with as_state_error(f"{name} cannot be written"), (directory / name).open("wb") as stream:
            sink = Sink(stream)
            writer(sink)
            files.append(sink.end(name))
    with as_state_error(f"{directory} cannot be written"):
        _sync(directory)
    return tuple(files)


def rank_name(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}.safetensors"


def write_rank(directory: Path, state: Snapshot) -> File:
    """Write one rank's compression state and sync it to disk."""
    (file,) = write_files(directory, {rank_name(state.rank, state.world): rank_writer(state)})
    return file


def rank_writer(state: Snapshot) -> Writer:
    """Return a function that writes one rank's compression state."""
    tensors: dict[str, np.ndarray[Any, Any]] = {_FIRST + name: value for name, value in state.first.items()}
    for prefix, kinds in ((_FIELD, state.fields), (_CONTROL, state.control)):
        for kind, values in kinds.items():
            tensors |= {f"{prefix}{kind}/{name}": value for name, value in values.items()}
    tensors["second"] = state.second
    tensors["ranges"] = np.array([[r.layer, r.start, r.length] for r in state.ranges], np.int64).reshape(
        -1, 3
    )
    return lambda sink: sink.write(safetensors.numpy.save(tensors))


def read_rank(directory: Path, manifest: Manifest, rank: int) -> Snapshot:
    """Read the compression state of rank ``rank``; raise StateError if its file is missing or was changed."""
    file = manifest.files[rank]
    with as_state_error(f"{file.name} cannot be read"), (directory / file.name).open("rb") as stream:
        data = stream.read(file.nbytes + 1)
    _compare(file, len(data), hashlib.sha256(data).hexdigest())
    try:
        tensors = safetensors.numpy.load(data)
        second, table = tensors.pop("second"), tensors.pop("ranges")
        if second.ndim != 1 or table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 3:
            raise ValueError(f"server-side errors of shape {second.shape}, ranges of shape {table.shape}")
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
    """Remove the tensors named ``prefix kind / layer`` and return them as kind -> layer -> values."""
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name in [name for name in tensors if name.startswith(prefix)]:
        kind, _, layer = name.removeprefix(prefix).partition("/")
        found.setdefault(kind, {})[layer] = tensors.pop(name)
    return found


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest atomically, last of all files: with it the directory is a checkpoint."""
    partial = directory / PARTIAL
    with as_state_error(f"{MANIFEST} cannot be written"):
        with partial.open("wb") as stream:
            sink = Sink(stream)
            sink.write(manifest.to_text().encode())
            sink.end(PARTIAL)
        partial.replace(directory / MANIFEST)
        _sync(directory)


def read_manifest(directory: Path) -> str:
    """Return the manifest's text; raise StateError if there is none."""
    path = directory / MANIFEST
    if not path.is_file():
        raise StateError(f"there is no checkpoint in {directory}: it has no {MANIFEST}")
    with as_state_error(f"{MANIFEST} cannot be read"), path.open("rb") as stream:
        data = stream.read(_MOST_MANIFEST_BYTES + 1)
    if len(data) > _MOST_MANIFEST_BYTES:
        raise StateError(f"{path} is too large for a manifest")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StateError(f"the checkpoint's manifest is damaged: {error}") from error


def is_checkpoint(directory: Path) -> bool:
    """Return whether the directory has a manifest of gradcomp, in any format."""
    try:
        body = json.loads(read_manifest(directory))
    except (StateError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("kind") == _KIND


def checked(directory: Path, file: File) -> Path:
    """Return the path of a file; raise StateError if it is missing, or not the file that was written."""
    path = directory / file.name
    with as_state_error(f"{file.name} cannot be read"), path.open("rb") as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    _compare(file, nbytes, sha256)
    return path


# -- the checkpoints of a directory ---------------------------------------------------------------------------------


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


def _compare(file: File, nbytes: int, sha256: str) -> None:
    if nbytes != file.nbytes:
        raise StateError(f"{file.name} does not have the {file.nbytes} bytes that were written")
    if sha256 != file.sha256:
        raise StateError(f"{file.name} is damaged: it does not match its checksum")


def _make(directory: Path) -> None:
    """Make a directory and those above it, and sync their names to disk."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def _sync(directory: Path) -> None:
    """Sync a directory to disk: syncing a file makes its contents durable, not its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def as_state_error(what: str) -> Iterator[None]:
    """Turn an OSError into a StateError that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{what}: {error}") from error


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
