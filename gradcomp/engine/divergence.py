"""Ranks that no longer do the same: what became of the last exchange, parameters and optimizers that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.config import Config
from gradcomp.core.errors import StateError, TransportError
from gradcomp.core.text import printable
from gradcomp.engine.keys import outcome_of
from gradcomp.pipeline.fingerprint import Fingerprints
from gradcomp.pipeline.requests import REPEATED
from gradcomp.reduce.header import APPLIED, DISCARDED, KEPT
from gradcomp.transport.control import ControlChannel

#: How long a rank waits for the others to say what they did; all of them know by then that they must.
ANSWER_SECONDS = 5.0

_IN_WORDS = {
    APPLIED: "applied the means (step())",
    DISCARDED: "threw the means away (no step(), or zero_grad() before it)",
    KEPT: "went on accumulating (neither step() nor zero_grad())",
    REPEATED: "stepped more than once",
    0: "had no exchange",
}


def comparison_is_due(config: Config, exchanges: int) -> bool:
    """Whether parameters are compared across ranks in the exchange after so many."""
    every = config.fingerprint_every_steps
    return 0 < exchanges <= config.fingerprint_steps or bool(every and exchanges and exchanges % every == 0)


def different_parameters(
    table: npt.NDArray[np.uint32], names: Sequence[str], steps: int
) -> StateError | None:
    """What is to be raised if the ranks' digests of their parameters, one row each, differ.

    A row of zeros is of a rank that has no say.
    """
    has_say: npt.NDArray[np.bool_] = np.asarray(table.any(axis=1))
    first = int(np.argmax(has_say))
    different = (table != table[first]) & has_say[:, None]
    differs = different.any(axis=0)
    if not differs.any():
        return None
    layer = int(np.argmax(differs))
    ranks = np.flatnonzero(different[:, layer]).tolist()
    return StateError(
        f"after step {steps} the parameter of layer {names[layer]!r} differs between rank {first} "
        f"and rank {', '.join(map(str, ranks))}; the ranks did not start from the same "
        "parameters (broadcast them) or do not apply the same update"
    )


def different_fingerprints(found: Fingerprints, names: Sequence[str], steps: int) -> StateError:
    """What is raised when the fingerprints of some ranks differ; it names what differs, on which ranks."""
    first = int(np.argmax(found.has_say))
    others = [rank for rank in np.flatnonzero(found.has_say).tolist() if rank != first]
    parts = _different_scalars({rank: found.scalars[rank] for rank in (first, *others)}, first)
    layers = (found.layers != found.layers[first]) & found.has_say[:, None]
    if layers.any():
        layer = int(np.argmax(layers.any(axis=0)))
        ranks = ", ".join(map(str, np.flatnonzero(layers[:, layer]).tolist()))
        parts.append(f"the parameter of layer {names[layer]!r} differs between rank {first} and rank {ranks}")
    if changed := [rank for rank in others if found.results[rank] != found.results[first]]:
        parts.append(
            f"the means that rank {', '.join(map(str, changed))} decoded in the last exchange are not those of rank "
            f"{first}: a message was changed on a rank or between ranks"
        )
    what = "; ".join(parts) or "the fingerprints of the ranks differ"
    return StateError(
        f"after step {steps} {what}. Ranks must start from the same parameters (broadcast them) and apply the same "
        "update: the same learning rate, and no change of gradients on one rank alone"
    )


def _different_scalars(texts: Mapping[int, str], first: int) -> list[str]:
    """The first of the optimizer's scalars that some rank has otherwise than rank ``first``, in words."""
    if len(set(texts.values())) == 1:
        return []
    groups = {rank: _groups_of(text) for rank, text in texts.items()}
    for number, group in enumerate(groups[first]):
        for name, value in group.items():
            values = {
                rank: those[number].get(name) if number < len(those) else None
                for rank, those in groups.items()
            }
            if different := [rank for rank, theirs in values.items() if theirs != value]:
                where = f" of group {number}" if len(groups[first]) > 1 else ""
                digits = 7 if len({_shown(each, 7) for each in values.values()}) > 1 else 17
                said = ", ".join(f"{_shown(values[rank], digits)} on rank {rank}" for rank in different)
                title = "learning rate" if name == "lr" else printable(name.replace("_", " "), 80)
                own = f"{_shown(value, digits)} on rank {first}"
                return [f"the optimizers differ: {title}{where} {said}, {own}"]
    ranks = [rank for rank, text in texts.items() if text != texts[first]]
    return [
        f"the optimizer of rank {', '.join(map(str, ranks))} has other settings than that of rank {first}"
    ]


def _shown(value: Any, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else printable(json.dumps(value), 80)


def _groups_of(text: str) -> list[dict[str, Any]]:
    """What a rank says of its optimizer; nothing if it says no such thing."""
    try:
        groups = json.loads(text)
    except ValueError:
        return []
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


def different_outcomes(
    control: ControlChannel,
    scope: str,
    own: int,
    ranks: Sequence[int],
    number: int,
    outcome: int,
    when: str,
) -> StateError:
    """What every rank raises when some applied the means of a step and others did not; names them all.

    All members, whose ranks in the job are ``ranks``, call it for the exchange of the same ``number``. Each publishes
    what it did and waits up to five seconds for the others.
    """
    keys = [outcome_of(scope, number, member) for member in range(len(ranks))]
    told = _told(control, keys, own, outcome)
    those = {bits: [ranks[m] for m in sorted(told) if told[m] == bits] for bits in sorted(set(told.values()))}
    parts = [f"rank {', '.join(map(str, some))} {_IN_WORDS[bits]}" for bits, some in those.items()]
    if silent := [rank for member, rank in enumerate(ranks) if member not in told]:
        parts.append(f"rank {', '.join(map(str, silent))} did not say")
    return StateError(
        f"{when} the ranks went different ways: {'; '.join(parts)}. Their parameters differ now: "
        "training cannot go on. A step must be skipped on all ranks or on none: decide it by a value that all "
        "ranks share"
    )


def _told(control: ControlChannel, keys: Sequence[str], rank: int, outcome: int) -> Mapping[int, int]:
    told = {rank: outcome}
    deadline = monotonic() + ANSWER_SECONDS
    try:
        control.publish(keys[rank], str(outcome).encode())
        while len(told) < len(keys) and monotonic() < deadline:
            for other, key in enumerate(keys):
                value = None if other in told else control.lookup(key)
                if value is not None and (bits := _parse(value)) is not None:
                    told[other] = bits
            sleep(0.01)
    except TransportError:
        pass  # what is known is said all the same
    return told


def _parse(value: bytes) -> int | None:
    known = {str(bits).encode(): bits for bits in _IN_WORDS}
    return known.get(bytes(value))
