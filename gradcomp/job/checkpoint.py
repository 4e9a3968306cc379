"""``save`` and ``load``: the compression state of all ranks, in a directory."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, GradcompError, StateError, TransportError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.text import printable
from gradcomp.engine import Exchanger
from gradcomp.job.channel import Call, channel_of
from gradcomp.job.network import Ranks
from gradcomp.job.runtime import current
from gradcomp.pipeline import Pipeline, checkpoint
from gradcomp.pipeline.snapshot import Snapshot, check, inherit, merge, restore, snapshot
from gradcomp.transport.inprocess import World

logger = logging.getLogger("gradcomp")

T = TypeVar("T")

_MOST_REPORT_BYTES = 1 << 29
_MOST_SHOWN = 1 << 16  # characters of a rank's error: it may list every layer
_KINDS: dict[Any, type[GradcompError]] = {"ConfigError": ConfigError, "TransportError": TransportError}
_TOKEN = re.compile("[0-9a-f]{16}")


def save(directory: str | Path, opt: Any) -> None:
    """Write the compression state of all ranks to ``directory``: residuals, step, plan, bucket order.

    ``opt``: what :func:`DistributedOptimizer` returned, or the state of :func:`ddp_comm_hook`. Model and optimizer are
    not in it; save them as always. One directory holds one checkpoint of one optimizer: the new one takes the place of
    the old one in a single rename, after all ranks' files are on disk.

    Collective over the ranks of ``opt``, between two steps. Wire: a few hundred bytes per rank. Disk: 4 bytes for each
    element with feedback per rank, and 4/N for the chunk owner's.
    Raises StateError on every rank if a gradient has come that ``step()`` has not used, or a file cannot be written;
    the old checkpoint is then untouched. ConfigError if ``opt`` is something else, PlanMismatchError if the ranks call
    different things.
    """
    talk = _Talk("gc.save", opt)
    path = Path(directory)

    def take() -> tuple[Snapshot, dict[str, str]]:
        state = keeper_of(opt).snapshot()
        shared = json.dumps(state.shared.to_plain(), sort_keys=True)
        return state, {"shared": hashlib.sha256(shared.encode()).hexdigest(), "token": secrets.token_hex(8)}

    state, told = talk.together("take", take)
    if any(other["shared"] != told[0]["shared"] for other in told):
        raise StateError("gc.save: the ranks are not at the same step of the same run")
    token = str(told[0]["token"])
    if not _TOKEN.fullmatch(token):
        raise WireFormatError(f"gc.save: rank 0 sent {token!r:.40} for a token")

    def write() -> tuple[None, dict[str, Any]]:
        return None, asdict(checkpoint.write_rank(path, state, token))

    def publish() -> tuple[None, None]:
        if talk.rank == 0:
            checkpoint.write_manifest(path, checkpoint.Manifest(state.shared, files))
        return None, None

    own = f"rank-{state.rank}-of-{state.world}.{token}.safetensors"
    try:
        files = tuple(checkpoint.File.from_plain(file) for file in talk.together("write", write)[1])
    except StateError:
        with suppress(OSError):
            (path / own).unlink()  # nothing refers to it
        raise
    talk.together("publish", publish)
    checkpoint.remove_others(path, {file.name for file in files})


def load(directory: str | Path, opt: Any) -> None:
    """Go on from what :func:`save` wrote to ``directory``.

    ``opt``: as for :func:`save`, wrapped anew with the same layers; its step, plan, bucket order and residuals are
    replaced. With the number of ranks that saved, training then continues bit for bit. With another, every rank gets
    the mean over the old ranks of what they had not sent: each reads the files of all. Model and optimizer are not in
    it; load them as always, before or after.

    Collective, between two steps. Rank 0 reads the manifest for all; every rank reads its own file.
    Raises StateError on every rank, with nothing changed, if there is no checkpoint, a file is missing or damaged, a
    layer is unknown, missing or misshapen (one error lists them all), the format is another version's, or a step is
    open. ConfigError and PlanMismatchError as for :func:`save`.
    """
    talk = _Talk("gc.load", opt)
    path = Path(directory)

    def open_manifest() -> tuple[Keeper, str]:
        keeper = keeper_of(opt)
        keeper.settle()
        return keeper, checkpoint.read_manifest(path) if talk.rank == 0 else ""

    def read() -> tuple[Snapshot, None]:
        manifest = checkpoint.Manifest.from_text(str(told[0]))
        world = len(manifest.files)
        if world == talk.size:
            state = checkpoint.read_rank(path, manifest, talk.rank)
        else:
            states = (checkpoint.read_rank(path, manifest, rank) for rank in range(world))
            state = merge(states, talk.rank, talk.size)
            if talk.rank == 0:
                logger.info("residuals of %d ranks are taken over by %d", world, talk.size)
        keeper.check(state)
        return state, None

    keeper, told = talk.together("open", open_manifest)
    state, _ = talk.together("read", read)
    keeper.restore(state)


class Keeper:
    """Where the compression state of an exchanger is.

    Without an exchanger, in a world of one, it keeps for a later job what a checkpoint holds, and applies nothing.
    ``settle``: called before the state is read or replaced; raises StateError in the midst of a step. ``unit``: see
    :class:`gradcomp.pipeline.snapshot.Shared`. ``ranks``: those that exchange.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        plan: Plan,
        config: Config,
        exchanger: Exchanger | None,
        settle: Callable[[], None],
        unit: float = 1.0,
        *,
        ranks: Ranks,
    ) -> None:
        self.settle = settle
        self.ranks = ranks
        self._layers = layers
        self._plan = plan
        self._config = config
        self._exchanger = exchanger
        self._unit = unit
        self.awaited = False
        self._restored = False

    @cached_property
    def pipeline(self) -> Pipeline:
        """The exchanger's; in a world of one, one that never steps, made when it is first asked for."""
        if self._exchanger is not None:
            return self._exchanger.pipeline
        (transport,) = World(1).transports()
        return Pipeline(self._layers, self._plan, transport, self._config, lambda layer: 0)

    @property
    def step(self) -> int:
        """Steps so far; none where nothing is exchanged and nothing was restored."""
        return self.pipeline.step if self._exchanger is not None or "pipeline" in self.__dict__ else 0

    def snapshot(self) -> Snapshot:
        """This rank's state. Local."""
        self.refuse_servers("saving the compression state")
        self.settle()
        return snapshot(self.pipeline, self._unit)

    def refuse_servers(self, what: str) -> None:
        """ConfigError if some ranks only serve: these answer steps, and nothing else. Local."""
        if self._exchanger is not None and self._exchanger.pipeline.servers:
            raise ConfigError(f"{what} does not work with dedicated servers, which answer nothing but steps")

    def check(self, state: Snapshot) -> None:
        """Raise StateError if the state does not fit. Local."""
        check(self.pipeline, state)

    def restore(self, state: Snapshot) -> None:
        """Go on from ``state``. Local."""
        self.refuse_servers("loading a compression state")
        self.settle()
        restore(self.pipeline, state, self._unit)
        self.awaited, self._restored = False, True

    def inherit(self, old: Keeper) -> None:
        """Go on from the state of a keeper with fewer layers. Local."""
        if self._exchanger is not None or "pipeline" in old.__dict__:
            inherit(self.pipeline, old.pipeline)

    def state_is_due(self) -> None:
        """The optimizer's own state came from elsewhere: unless ours does too, the next step says so."""
        self.awaited = not self._restored

    def before_step(self) -> None:
        """Warn if only the optimizer's own state was loaded."""
        awaited, self.awaited, self._restored = self.awaited, False, False
        if (
            awaited
            and self._exchanger is not None
            and self.pipeline.residuals.nbytes + self.pipeline.fields.nbytes
        ):
            logger.warning(
                "the optimizer's state was loaded, its compression state was not: residuals start again from zero, "
                "what had not been sent is lost (gc.load)"
            )


def keeper_of(opt: Any) -> Keeper:
    """The keeper of a distributed optimizer or of a hook's state; ConfigError for anything else."""
    keeper = _keeper_or_none(opt)
    if keeper is None:
        raise ConfigError(
            f"expected what DistributedOptimizer or ddp_comm_hook returned, got {type(opt).__name__}"
        )
    return keeper


def _keeper_or_none(opt: Any) -> Keeper | None:
    keeper = getattr(getattr(opt, "_gradcomp", opt), "keeper", None)
    return keeper if isinstance(keeper, Keeper) else None


@contextmanager
def not_from_checkpoint(optimizer: Any) -> Iterator[None]:
    """What the optimizer's ``load_state_dict`` takes in here has no compression state that belongs to it."""
    keeper = getattr(getattr(optimizer, "_gradcomp", None), "keeper", None)
    awaited = isinstance(keeper, Keeper) and keeper.awaited
    yield
    if isinstance(keeper, Keeper):
        keeper.awaited = awaited


class _Talk:
    """What the ranks of ``opt`` tell each other in one call. They go on only if it went well on all of them."""

    def __init__(self, name: str, opt: Any) -> None:
        self._name = name
        keeper = _keeper_or_none(opt)
        if keeper is not None:
            keeper.refuse_servers(name)
        self._channel = channel_of(current().everyone if keeper is None else keeper.ranks)
        self.rank = 0 if self._channel is None else self._channel.rank
        self.size = 1 if self._channel is None else self._channel.size

    def together(self, stage: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do ``work`` on every rank: its first result, and every rank's second one.

        If it raised on any rank: an error on all, with what happened where, of the first one's kind.
        """
        result: list[T] = []
        cause: Exception | None = None
        report: dict[str, Any]
        try:
            mine, told = work()
            result.append(mine)
            report = {"told": told}
        except (GradcompError, OSError) as error:
            cause = error
            report = {"error": str(error), "kind": type(error).__name__}
        reports = self._gather(stage, json.dumps(report).encode())
        failures = [
            f"rank {r}: {printable(str(other['error']), _MOST_SHOWN)}"
            for r, other in enumerate(reports)
            if "error" in other
        ]
        if failures:
            kinds = [other["kind"] for other in reports if "error" in other]
            kind = _KINDS.get(kinds[0], StateError)
            shown = "; ".join(failures[:3]) + (f"; and {len(failures) - 3} more" if len(failures) > 3 else "")
            raise kind(f"{self._name}: {shown}") from cause
        return result[0], [other["told"] for other in reports]

    def _gather(self, stage: str, text: bytes) -> list[dict[str, Any]]:
        channel = self._channel
        if channel is None:
            return [json.loads(text)]

        def exchange(lengths: list[int]) -> list[dict[str, Any]]:
            if not all(0 <= length <= _MOST_REPORT_BYTES for length in lengths):
                raise WireFormatError(f"reports of {lengths} bytes")
            whole = channel.allgather(np.frombuffer(text, dtype=np.uint8), lengths).tobytes()
            ends = np.cumsum(lengths).tolist()
            return [_report(whole[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

        return channel.submit(Call(self._name, [f"{self._name}: {stage}"], len(text)), exchange).result()


def _report(text: bytes) -> dict[str, Any]:
    try:
        report = json.loads(text)
    except ValueError as error:
        raise WireFormatError(f"a rank's report is not JSON: {error}") from error
    if not isinstance(report, dict) or not (report.keys() == {"told"} or report.keys() == {"error", "kind"}):
        raise WireFormatError("a rank's report is malformed")
    return report
