"""States of values and of optimizers' compression, which both frontends keep through deaths and arrivals of ranks."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcomp.core.errors import ConfigError
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_of
from gradcomp.exchange.snapshot import Snapshot, outline, regroup
from gradcomp.job import runtime
from gradcomp.job.checkpoint import from_plain, to_plain
from gradcomp.job.elastic import Commit, State
from gradcomp.job.elastic_sampler import ElasticSampler


class ValuesState(State):
    """Keeps values under names, as attributes. A frontend says how objects are sent, and what else it keeps."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        taken = [name for name in values if name.startswith("_") or hasattr(type(self), name)]
        if taken:
            raise ConfigError(f"a state has {taken[0]!r} for something else: choose another name")
        self._names = tuple(values)
        for name, value in values.items():
            setattr(self, name, value)

    if TYPE_CHECKING:  # so that type checkers accept a script that reads and assigns its own values

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    # -- what a frontend implements --------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _broadcast_object(value: Any, root_rank: int) -> Any:
        """Return the root's object on every rank. Collective."""

    def _broadcast(self, value: Any, root_rank: int) -> bool:
        """Send a value that is no object to pass around, such as a model; return False for all others. Collective."""
        return False

    def _read(self, value: Any) -> Any:
        """Return what is kept of a value; it may be copied later."""
        return value.state_dict() if _is_stateful(value) else value

    def _write(self, name: str, saved: Any) -> None:
        """Let the value of this name be what was kept of it."""
        value = getattr(self, name)
        if _is_stateful(value):
            value.load_state_dict(saved)
        else:
            setattr(self, name, saved)

    # -- State -----------------------------------------------------------------------------------------------------

    def sync(self, root_rank: int = 0) -> None:
        """Give every rank the values of ``root_rank``, and save them. Collective.

        Wire: a broadcast of models, optimizer states and values.
        """
        plain: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if not self._broadcast(value, root_rank):
                plain[name] = self._read(value)
        received = self._broadcast_object(plain, root_rank)
        if runtime.rank() != root_rank:
            for name, saved in received.items():
                self._write(name, saved)
        self.save()

    def _attach(self) -> None:
        for name in self._names:
            if isinstance(value := getattr(self, name), ElasticSampler):
                value.reset()

    def _take(self) -> Commit:
        return Commit({name: copy.deepcopy(self._read(getattr(self, name))) for name in self._names})

    def _put(self, values: Any) -> None:
        for name in self._names:
            self._write(name, copy.deepcopy(values[name]))


class OptimizerState(ValuesState):
    """Keeps the compression state of optimizers too. A frontend says which these are."""

    @property
    @abstractmethod
    def _wrapped(self) -> list[tuple[str, Any]]:
        """Return the optimizers that exchange gradients, with their names."""

    @abstractmethod
    def _reattach(self, optimizer: Any) -> None:
        """Let an optimizer exchange among the ranks of the generation. Collective."""

    @staticmethod
    @abstractmethod
    def _broadcast_arrays(value: Any, root_rank: int) -> Any:
        """Return the root's object of arrays on every rank. Collective."""

    @staticmethod
    @abstractmethod
    def _allgather_arrays(value: Any) -> list[Any]:
        """Return every rank's object of arrays. Collective."""

    def _take(self) -> Commit:
        commit = super()._take()
        snapshots = {name: checkpoint_manager_of(value).snapshot() for name, value in self._wrapped}
        residuals = [array for state in snapshots.values() for array in (*state.first.values(), state.second)]
        squares = sum(float(np.vdot(array, array)) for array in residuals)
        elements = sum(array.size for state in snapshots.values() for array in state.first.values())
        return Commit({**commit.values, "": snapshots}, elements, math.sqrt(squares))

    def _put(self, values: Any) -> None:
        super()._put(values)
        for name, value in self._wrapped:
            manager, state = checkpoint_manager_of(value), values[""][name]
            transport = manager.pipeline.transport
            if (state.rank, state.world) == (transport.rank, transport.size):
                manager.restore(state)

    def _attach(self) -> None:
        super()._attach()
        if runtime.current().network.member is not None:
            for _, value in self._wrapped:
                self._reattach(value)

    def _adopt(self, root: int, own: Any | None, *, newcomers: bool) -> None:
        rank, size = runtime.rank(), runtime.size()
        for name, value in self._wrapped:
            manager = checkpoint_manager_of(value)
            state: Snapshot | None = None if own is None else own[""][name]
            kept = list(state.first) if state is not None else []
            if newcomers:
                told: Any = None
                if state is not None and rank == root:
                    told = {"state": to_plain(outline(state)), "kept": kept}
                told = self._broadcast_arrays(told, root)
                kept = told["kept"]
                state = state or from_plain(told["state"])
            assert state is not None, "a rank without a commit is a newcomer"
            control = (
                {} if state.shared.control is None else self._controls(state if own is not None else None)
            )
            manager.restore(regroup(state, rank, size, kept, control))

    def _controls(self, state: Snapshot | None) -> dict[str, dict[str, Any]]:
        """Return the controller's arrays of all survivors, of which each has those of some layers. Collective."""
        found: dict[str, dict[str, Any]] = {}
        own = {} if state is None else {kind: dict(values) for kind, values in state.control.items()}
        for told in self._allgather_arrays(own):
            for kind, values in told.items():
                found.setdefault(kind, {}).update(values)
        return found


def _is_stateful(value: Any) -> bool:
    """Return whether a value is kept by its ``state_dict`` and ``load_state_dict``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
