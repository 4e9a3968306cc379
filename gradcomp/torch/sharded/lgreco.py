"""L-GreCo over a sharded model: one budget for the errors of all weights and of all gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradcomp.compress import Compressor, Policy
from gradcomp.compress.groups import Piece, group_of
from gradcomp.control.base import Doubles
from gradcomp.control.candidates import HYBRID, choices_of
from gradcomp.control.distortion.errors import errors
from gradcomp.control.lgreco import LGreCo
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, Array

if TYPE_CHECKING:
    from gradcomp.torch.sharded.units import Sharded, Unit

logger = logging.getLogger("gradcomp")


def check_controller(controller: Any) -> None:
    """Raise ConfigError unless a sharded model can be controlled like this."""
    if not isinstance(controller, LGreCo):
        raise ConfigError(f"compress_fsdp takes LGreCo as its controller, got {type(controller).__name__}")
    refused = {
        "objective": controller.objective != "bytes",
        "metric": controller.metric not in (None, "squared", "norm"),
        "window": controller.window is not None,
        "accordion": controller.accordion is not None,
        "blocks": controller.blocks > 1,
        "levels": controller.levels == HYBRID,
    }
    if named := [name for name, wrong in refused.items() if wrong]:
        raise ConfigError(
            f"over a sharded model LGreCo chooses quantisers by the errors of single steps: {', '.join(named)} must "
            "have the default value, levels may be numbers of bits or quantisers"
        )


@dataclass(frozen=True, eq=False)
class Row:
    """One parameter's weights or gradients, with its choices."""

    kind: str
    unit: Unit
    number: int
    parameter: Sharded
    choices: tuple[Compressor, ...]
    reference: int

    @property
    def name(self) -> str:
        return self.parameter.name


@dataclass(eq=False)
class ShardedLGreCo:
    """Chooses the quantiser of every parameter, for its weights and for its gradients.

    minimise sum over rows l of n(l) bytes(l, c_l)
    subject to   sum of E_w(l, c_l) / sum of E_w(l, r_l) + sum of E_g(l, c_l) / sum of E_g(l, r_l) <= 2 alpha,

    with a row for the weights of a parameter and one for its gradients. E_w(l, c) = ||x_l - C_c(x_l)||^2 over the
    shards of all ranks; E_g(l, c) is the same of gradients, where every rank measures only the part of its own gradient
    that it owns. n(l) counts the exchanges of a period. So all rows share one budget, and what the reference loses of
    weights counts as much as what it loses of gradients.

    The ranks gather each other's tables, 8 bytes for each choice and row. Sums are taken in rank order, and every rank
    solves the same program. State: the choices, and the sums of the period, equal on all ranks.
    Source: Markov et al. 2024, Algorithm 1. Markov 2024, section 6, names weights as future work; the common budget is
    ours.
    """

    controller: LGreCo
    rows: Sequence[Row]
    exchanger: Exchanger
    seed: int
    #: By kind and parameter, the quantiser in use.
    chosen: dict[tuple[str, str], Compressor] = field(default_factory=dict)
    samples: int = 0
    _pending: dict[int, Doubles] = field(default_factory=dict)
    _runs: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        transport = self.exchanger.pipeline.transport
        self.rank, self.world = transport.rank, transport.size
        self.width = max((len(row.choices) for row in self.rows), default=1)
        self.errors = np.zeros((len(self.rows), self.width))
        self._current = np.array([row.reference for row in self.rows], dtype=np.int64)
        self._payloads = np.full((len(self.rows), self.width), np.inf)
        for row, payloads in zip(self.rows, self._payloads, strict=True):
            sizes = np.diff(row.parameter.borders(len(row.unit.ranks))).tolist()
            payloads[: len(row.choices)] = [
                sum(payload_bytes(choice, size) for size in sizes) for choice in row.choices
            ]

    def is_sampled(self, step: int) -> bool:
        """Return True for the steps of a period that are sampled: evenly distributed, the last one always."""
        every, count = self.controller.every_steps, min(self.controller.sampled, self.controller.every_steps)
        place = step % every
        return (place + 1) * count // every > place * count // every

    def ran(self, kind: str, unit: Unit) -> None:
        """Count an exchange of a unit that sent codes."""
        self._runs[kind, unit.name] = self._runs.get((kind, unit.name), 0) + 1

    def see_gradients(self, unit: Unit, numbers: Sequence[int], whole: torch.Tensor) -> None:
        """Measure this rank's own gradients in a sampled step, of the part that it owns.

        If a step has several reductions of a unit, the last one counts.
        """
        blocks = unit.blocks(numbers, self.world)
        places = dict(zip(numbers, blocks.offsets, strict=True))
        block = whole.detach().view(self.world, -1)[self.rank].float().cpu().numpy()
        for index, row in enumerate(self.rows):
            if row.kind == REDUCE_SCATTER and row.unit is unit and row.number in places:
                begin, end = row.parameter.borders(self.world)[self.rank :][:2]
                at = places[row.number]
                self._measure(index, block[at : at + end - begin])

    def _measure(self, index: int, values: Array) -> None:
        row = self.rows[index]
        spec = LayerSpec(row.name, (values.size,), "float32", "weight")
        floats = np.ascontiguousarray(values, dtype=np.float32)
        lost = errors(row.choices, spec, floats, self.seed, memory_bytes=self.controller.memory_bytes)
        self._pending[index] = lost**2

    def end_step(self, steps: int) -> bool:
        """Measure weights after a sampled step, and decide at the end of a period; return True if choices changed.

        Collective in sampled steps.
        """
        if not self.is_sampled(steps - 1):
            return False
        for index, row in enumerate(self.rows):
            if row.kind == ALL_GATHER and (shard := row.parameter.shard) is not None:
                self._measure(index, shard.detach().float().reshape(-1).cpu().numpy())
        found = np.zeros((len(self.rows), 1 + self.width))
        for index, squares in self._pending.items():
            found[index, 0], found[index, 1 : 1 + len(squares)] = 1.0, squares
        self._pending.clear()
        total = np.zeros_like(found)
        for each in self.exchanger.allgather_bytes(found.tobytes()):
            total += np.frombuffer(each).reshape(found.shape)
        total[total[:, 0] < self.world, 1:] = 0.0  # some rank had no gradient
        if np.isfinite(total).all():
            self.errors += total[:, 1:] if self.controller.squared else np.sqrt(total[:, 1:])
            self.samples += 1
        return self._decide() if steps % self.controller.every_steps == 0 else False

    def _decide(self) -> bool:
        before = self._current.copy()
        rows = np.arange(len(self.rows))
        runs = np.array([self._runs.get((row.kind, row.unit.name), 0) for row in self.rows], dtype=np.float64)
        of_weights = np.array([row.kind == ALL_GATHER for row in self.rows])
        reference = np.array([row.reference for row in self.rows], dtype=np.int64)
        allowed = self.errors[rows, reference]
        known = (runs > 0) & (allowed > 0)
        shares = np.where(np.isinf(self._payloads), np.inf, self.errors)
        for mask in (of_weights & known, ~of_weights & known):
            shares[mask] /= allowed[mask].sum()
        costs = self._payloads * np.maximum(runs, 1.0)[:, None]
        if self.samples and known.any():
            found = self.controller.solve(shares[known], shares[rows, reference][known], costs[known])
            self._current[known] = reference[known] if found is None else found
        if self.rank == 0:
            now, then = (float(costs[rows, at][known].sum()) for at in (self._current, reference))
            logger.info(
                "lgreco: weights and gradients take %.3f times the bytes of the reference",
                now / max(then, 1.0),
            )
        self.errors[:], self.samples = 0.0, 0
        self._runs.clear()
        self._choose()
        return bool((before != self._current).any())

    def _choose(self) -> None:
        self.chosen = {
            (row.kind, row.name): row.choices[at]
            for row, at in zip(self.rows, self._current.tolist(), strict=True)
        }

    def state(self) -> dict[str, Any]:
        """Return the choices and the sums, equal on all ranks, as JSON holds them."""
        return {
            "levels": [row.choices[at].to_string() for row, at in zip(self.rows, self._current, strict=True)],
            "errors": self.errors.tolist(),
            "samples": self.samples,
            "runs": [[kind, unit, count] for (kind, unit), count in sorted(self._runs.items())],
        }

    def resume(self, state: Any) -> None:
        """Continue from :meth:`state`; raise StateError if it is that of other rows."""
        try:
            current = [
                [choice.to_string() for choice in row.choices].index(text)
                for row, text in zip(self.rows, state["levels"], strict=True)
            ]
            sums = np.array(state["errors"], dtype=np.float64).reshape(self.errors.shape)
            samples, runs = int(state["samples"]), {(k, u): int(n) for k, u, n in state["runs"]}
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a state of LGreCo over this sharded model: {error!r}") from error
        self._current = np.array(current, dtype=np.int64)
        self.errors, self.samples, self._runs = sums, samples, runs
        self._choose()


def payload_bytes(choice: Compressor, size: int) -> float:
    """Return the bytes of a shard of ``size`` elements."""
    if not size:
        return 0.0
    group = group_of([Piece(0, 0, size)], [LayerSpec("shard", (size,), "float32", "weight")], [choice])
    return float(group.compressor.wire_bytes(group).sum())


def rows_of(
    units: Sequence[Unit],
    policies: Mapping[str, Policy],
    controller: LGreCo,
    check_choice: Callable[[str, LayerSpec, Compressor], None],
) -> list[Row]:
    """Return a row for each parameter and kind that its policy quantises."""
    rows = []
    for kind, policy in policies.items():
        for unit in units:
            for number, parameter in enumerate(unit.parameters):
                spec = parameter.spec(parameter.current.dtype)
                reference, reason = policy.choose(spec)
                if reason is not None or reference.traits.exact:
                    continue
                choices = choices_of(spec, reference, controller.levels)
                for choice in choices:
                    check_choice(kind, spec, choice)
                rows.append(Row(kind, unit, number, parameter, choices, choices.index(reference)))
    if not rows:
        raise ConfigError("LGreCo has nothing to choose: no parameter of the sharded model is quantised")
    return rows
