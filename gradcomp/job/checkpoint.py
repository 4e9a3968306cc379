"""Implements ``save`` and ``load``, which write and read checkpoints of the compression state."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gradcomp.core.errors import ConfigError, StateError, WireFormatError
from gradcomp.core.state import Range
from gradcomp.exchange import checkpoint
from gradcomp.exchange.checkpoint import File, Manifest, Writer
from gradcomp.exchange.checkpoint_manager import CheckpointManager, Expected, checkpoint_manager_of
from gradcomp.exchange.fingerprint import Digests
from gradcomp.exchange.snapshot import Shared, Snapshot, merge
from gradcomp.job.all_or_none import together_of
from gradcomp.job.call_matching import Array

logger = logging.getLogger("gradcomp")

T = TypeVar("T")

#: The number of older checkpoints that ``save`` keeps.
KEEP = 2


def save(directory: str | Path, opt: Any, *, keep: int = KEEP) -> None:
    """Write the compression state of all ranks to a new checkpoint in ``directory``.

    It holds residuals, step, plan and bucket order, but neither model nor optimizer: save those as always. The
    checkpoint counts once all ranks' files are on disk; then all but the last ``keep`` older ones are removed.

    Collective over the ranks of ``opt``, between two steps. Wire: a few hundred bytes per rank, and up to 12 per
    parameter. Disk: on each rank, 4 bytes for each element that has a residual, and 4/N bytes for each that has a
    server-side error.

    Args:
        directory: holds the checkpoints of this optimizer alone.
        opt: what :func:`DistributedOptimizer` returned.
        keep: the number of older checkpoints to keep.

    Raises:
        ConfigError: on every rank, if ``opt`` was not wrapped or ``keep`` is not a whole number of at least 0.
        PlanMismatchError: if the ranks call different things.
        StateError: on every rank, if a step is open or a file cannot be written; the older checkpoints are then
            untouched.
    """
    save_with(directory, opt, lambda rank, world: {}, keep=keep)


def save_with(
    directory: str | Path,
    opt: Any,
    parts: Callable[[int, int], Mapping[str, Writer]],
    *,
    keep: int,
    arguments: Sequence[str] = (),
) -> None:
    """Save as :func:`save` does, with further files: ``parts(rank, world)`` returns the writers of this rank's."""
    ranks = together_of("gc.save", opt, arguments)
    path = Path(directory)

    def take() -> tuple[_Taken, dict[str, Any]]:
        if type(keep) is not int or keep < 0:
            raise ConfigError(f"keep must be a whole number of at least 0, got {keep!r}")
        checkpoint_manager = checkpoint_manager_of(opt)
        state, digests = checkpoint_manager.snapshot(), checkpoint_manager.digests()
        taken = _Taken(state, digests, parts(ranks.rank, ranks.size))
        shared = json.dumps(state.shared.to_plain(), sort_keys=True)
        # The values that must be equal on all ranks.
        told: dict[str, Any] = {
            "shared": hashlib.sha256(shared.encode()).hexdigest(),
            "digests": None if digests is None else list(digests.values.values()),
        }
        if ranks.rank == 0:
            _refuse_another_model(path, taken.state)
            told |= {"name": checkpoint.new_name(path), "complete": checkpoint.complete(path)}
        return taken, told

    taken, told = ranks.do("take", take)
    _compare(taken, told)
    name, complete = told[0].get("name"), told[0].get("complete")
    if (
        not checkpoint.is_name(name)
        or not isinstance(complete, list)
        or not all(map(checkpoint.is_name, complete))
    ):
        raise WireFormatError(f"gc.save: rank 0 sent {name!r:.40}, which is no checkpoint's name")

    def write() -> tuple[tuple[File, ...], Any]:
        # Files of saves that were killed would fill the disk.
        checkpoint.remove_others(path, [*complete, name])
        files = checkpoint.write_files(path / name, taken.writers)
        return files, [asdict(file) for file in files]

    def publish() -> tuple[None, None]:
        if ranks.rank == 0:
            checkpoint.write_manifest(path / name, _manifest(taken, written))
        return None, None

    def undo() -> None:
        checkpoint.remove_others(path, complete)

    _, written = ranks.do("write", write, undo)
    ranks.do("publish", publish, undo)
    checkpoint.remove_others(path, [*complete[len(complete) - min(keep, len(complete)) :], name])


@dataclass(frozen=True)
class _Taken:
    """Holds the data that one rank will write."""

    state: Snapshot
    digests: Digests | None
    parts: Mapping[str, Writer]

    @property
    def writers(self) -> dict[str, Writer]:
        """Return the writers of the rank's files; the first file holds its compression state."""
        own = checkpoint.rank_name(self.state.rank, self.state.world)
        return {own: checkpoint.rank_writer(self.state), **self.parts}


def _compare(taken: _Taken, told: list[Any]) -> None:
    if any(other["shared"] != told[0]["shared"] for other in told):
        raise StateError(
            "gc.save: the ranks are not at the same step of the same run: call it after the same step on all ranks"
        )
    for rank, other in enumerate(told):
        if taken.digests is not None and other["digests"] != told[0]["digests"]:
            pairs = zip(taken.digests.values, told[0]["digests"], other["digests"], strict=True)
            name = next(name for name, mine, theirs in pairs if mine != theirs)
            raise StateError(
                f"gc.save: parameter {name!r} differs between rank 0 and rank {rank}: the ranks did not start from the "
                "same parameters (broadcast them) or do not apply the same update"
            )


def _refuse_another_model(path: Path, state: Snapshot) -> None:
    """Raise StateError if the directory is another optimizer's: saving there would remove its checkpoints."""
    try:
        last = path / checkpoint.last(path)
        there = Manifest.from_text(checkpoint.read_manifest(last)).shared.layers
    except StateError:
        return  # there is none, or one that is damaged or of another version, which load() reports
    if not there.items() & state.shared.layers.items():
        raise StateError(
            f"{path} has checkpoints of another model, whose first layer is {next(iter(there))!r}: "
            "give each optimizer a directory of its own"
        )


def _manifest(taken: _Taken, written: list[Any]) -> Manifest:
    files = [[File.from_plain(file) for file in of_rank] for of_rank in written]
    parts = tuple(file for of_rank in files for file in of_rank[1:])
    return Manifest(taken.state.shared, tuple(of_rank[0] for of_rank in files), parts, taken.digests)


def load(directory: str | Path, opt: Any) -> None:
    """Continue from the last complete checkpoint that :func:`save` wrote to ``directory``.

    Step, plan, bucket order and residuals of ``opt`` are replaced. With the number of ranks that saved, training
    continues bit for bit. With another number, every rank reads the files of all and takes the mean of the old ranks'
    residuals. Model and optimizer are not in the checkpoint; load them as always, before or after.

    Collective, between two steps. Rank 0 reads the manifest for all; every rank reads its own file.

    Args:
        directory: as for :func:`save`.
        opt: as for :func:`save`, wrapped anew with the same layers.

    Raises:
        ConfigError: on every rank, if ``opt`` was not wrapped.
        PlanMismatchError: if the ranks call different things.
        StateError: on every rank, with nothing changed, if there is no checkpoint, a file is missing or damaged, a
            layer is unknown, missing or misshapen (one error lists them all), the format is another version's, or a
            step is open.
    """
    load_with(directory, opt, lambda found: lambda: None)


@dataclass(frozen=True)
class Found:
    """Describes a checkpoint that is being loaded, on one rank of ``world``."""

    directory: Path
    manifest: Manifest
    checkpoint_manager: CheckpointManager
    rank: int
    world: int

    def part(self, name: str) -> Path | None:
        """Return the path of a further file, whose checksum is verified; None if the checkpoint has no such file."""
        file = self.manifest.part(name)
        return None if file is None else checkpoint.checked(self.directory, file)

    def state(self) -> Snapshot:
        """Return this rank's compression state. StateError if it does not fit."""
        world = len(self.manifest.files)
        if world == self.world:
            state = checkpoint.read_rank(self.directory, self.manifest, self.rank)
        else:
            states = (checkpoint.read_rank(self.directory, self.manifest, rank) for rank in range(world))
            state = merge(states, self.rank, self.world)
            if self.rank == 0:
                logger.info("residuals of %d ranks are taken over by %d", world, self.world)
        self.checkpoint_manager.check(state)
        return state

    def expected(self) -> Expected | None:
        """Return the digests that the parameters must have, or None if the checkpoint has none."""
        if self.manifest.parameters is None:
            return None
        return Expected(self.manifest.parameters, self.manifest.shared.step, str(self.directory))


def load_with(
    directory: str | Path,
    opt: Any,
    prepare: Callable[[Found], Callable[[], T]],
    *,
    missing_ok: bool = False,
    arguments: Sequence[str] = (),
) -> T | None:
    """Load as :func:`load` does, with further files: ``prepare`` reads them and returns a function that applies them.

    That function is called once ``prepare`` has returned on all ranks. ``missing_ok``: return None where there is no
    checkpoint.
    """
    ranks = together_of("gc.load", opt, arguments)
    path = Path(directory)

    def open_last() -> tuple[CheckpointManager, Any]:
        checkpoint_manager = checkpoint_manager_of(opt)
        checkpoint_manager.finish_step()
        if ranks.rank or (missing_ok and not checkpoint.complete(path)):
            return checkpoint_manager, None
        name = checkpoint.last(path)
        return checkpoint_manager, {"name": name, "manifest": checkpoint.read_manifest(path / name)}

    def read() -> tuple[tuple[Found, Snapshot, Callable[[], T]], None]:
        if not checkpoint.is_name(told[0].get("name")):
            raise WireFormatError(f"gc.load: rank 0 sent {told[0]!r:.40}, which names no checkpoint")
        manifest = Manifest.from_text(str(told[0].get("manifest")))
        found = Found(path / told[0]["name"], manifest, checkpoint_manager, ranks.rank, ranks.size)
        return (found, found.state(), prepare(found)), None

    checkpoint_manager, told = ranks.do("open", open_last)
    if told[0] is None and missing_ok:
        return None
    (found, state, use), _ = ranks.do("read", read)
    result = use()
    checkpoint_manager.restore(state, found.expected())
    return result


# ---- snapshots as arrays, numbers and strings, which any framework can store


def to_plain(state: Snapshot) -> dict[str, Any]:
    """Return the snapshot as nested dicts and lists."""
    names = list(state.shared.layers)
    return {
        "rank": state.rank,
        "world": state.world,
        **state.shared.to_plain(),
        "residuals": dict(state.first),
        "second_residual_ranges": [[names[r.layer], r.start, r.length] for r in state.ranges],
        "second_residuals": state.second,
        "fields": {kind: dict(values) for kind, values in state.fields.items()},
        "control_arrays": {kind: dict(values) for kind, values in state.control.items()},
    }


def from_plain(data: Any) -> Snapshot:
    """Return the snapshot that :func:`to_plain` converted; StateError for anything else."""
    shared = Shared.from_plain(data)
    numbers = {name: number for number, name in enumerate(shared.layers)}
    try:
        rows = [(numbers[name], start, length) for name, start, length in data["second_residual_ranges"]]
        values = [data["rank"], data["world"], *(value for row in rows for value in row)]
        if not all(type(value) is int for value in values):
            raise TypeError("a number is not whole")
        return Snapshot(
            data["rank"],
            data["world"],
            shared,
            {str(name): _array(value) for name, value in data["residuals"].items()},
            tuple(Range(*row) for row in rows),
            _array(data["second_residuals"]).reshape(-1),
            _arrays(data.get("fields", {})),  # older states have none
            _arrays(data.get("control_arrays", {})),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"not a compression state: {error!r}") from error


def _arrays(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    return {
        str(kind): {str(name): _array(value) for name, value in values.items()}
        for kind, values in kinds.items()
    }


def _array(value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return value
