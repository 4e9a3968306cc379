"""Errors tell how ranks diverge: outcomes of the last exchange, parameters or optimizers that differ."""

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
from gradcomp.reduce.header import APPLIED, DISCARDED, EDITED, KEPT, LATE
from gradcomp.transport.control import ControlChannel

#: A rank waits this long for the others to publish what they did; all of them know that they must.
ANSWER_SECONDS = 5.0

_IN_WORDS = {
    APPLIED: "applied the means (step())",
    DISCARDED: "threw the means away (no step(), or zero_grad() before it)",
    KEPT: "went on accumulating (neither step() nor zero_grad())",
    REPEATED: "stepped more than once",
    0: "had no exchange",
}

_OF_MEANS = {
    LATE: "had no gradient",
    EDITED: "changed theirs between backward() and step()",
    0: "left them as they were",
}


def comparison_is_due(config: Config, exchanges: int) -> bool:
    """Return whether the exchange after so many compares parameters across ranks."""
    every = config.fingerprint_every_steps
    return 0 < exchanges <= config.fingerprint_steps or bool(every and exchanges and exchanges % every == 0)


def different_parameters(
    table: npt.NDArray[np.uint32], names: Sequence[str], ranks: Sequence[int], steps: int
) -> StateError | None:
    """Return the error to raise if the parameters' digests, a row for each of ``ranks``, differ, else None.

    A row of zeros belongs to a rank that has nothing to compare.
    """
    has_say: npt.NDArray[np.bool_] = np.asarray(table.any(axis=1))
    first = int(np.argmax(has_say))
    different = (table != table[first]) & has_say[:, None]
    differs = different.any(axis=0)
    if not differs.any():
        return None
    layer = int(np.argmax(differs))
    others = ", ".join(str(ranks[member]) for member in np.flatnonzero(different[:, layer]).tolist())
    return StateError(
        f"after step {steps} the parameter of layer {names[layer]!r} differs between rank {ranks[first]} "
        f"and rank {others}; the ranks did not start from the same "
        "parameters (broadcast them) or do not apply the same update"
    )


def different_fingerprints(
    found: Fingerprints, names: Sequence[str], ranks: Sequence[int], when: str
) -> StateError:
    """Return the error for fingerprints that differ; it names what differs, on which ranks."""
    members = np.flatnonzero(found.has_say).tolist()
    first = members[0]
    parts = _different_scalars({ranks[member]: found.scalars[member] for member in members}, ranks[first])
    layers = (found.layers != found.layers[first]) & found.has_say[:, None]
    if layers.any():
        layer = int(np.argmax(layers.any(axis=0)))
        others = ", ".join(str(ranks[member]) for member in np.flatnonzero(layers[:, layer]).tolist())
        parts.append(
            f"the parameter of layer {names[layer]!r} differs between rank {ranks[first]} and rank {others}"
        )
    if changed := [ranks[member] for member in members if found.results[member] != found.results[first]]:
        parts.append(
            f"what rank {', '.join(map(str, changed))} decoded in the last exchange is not what rank {ranks[first]} "
            "did: a message was changed on a rank or between ranks"
        )
    what = "; ".join(parts) or "the fingerprints of the ranks differ"
    return StateError(
        f"{when} {what}. Ranks must start from the same parameters (broadcast them) and apply the same "
        "update: the same learning rate, and no change of gradients on one rank alone"
    )


def _different_scalars(texts: Mapping[int, str], first: int) -> list[str]:
    """Describe the first of the optimizer's scalars that some rank has otherwise than rank ``first``."""
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
    """Return the scalars of a rank's parameter groups, or nothing if the text has none."""
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
    """Return the error for a step whose means some ranks applied and others did not; it names them all.

    All members, whose ranks in the job are ``ranks``, call it for the exchange of the same ``number``. Each
    publishes what it did and waits up to five seconds for the others.
    """
    parts = _in_words(_told(control, scope, own, ranks, number, outcome), ranks, _IN_WORDS)
    return StateError(
        f"{when} the ranks went different ways: {'; '.join(parts)}. Their parameters differ now: "
        "training cannot go on. A step must be skipped on all ranks or on none: decide it by a value that all "
        "ranks share"
    )


def different_means(
    control: ControlChannel, scope: str, own: int, ranks: Sequence[int], step: int, notices: int
) -> StateError:
    """Return the error for means that some ranks changed before a late rank had them; it names them all.

    All members call it, as they call :func:`different_outcomes`.
    """
    parts = _in_words(_told(control, scope, own, ranks, step, notices), ranks, _OF_MEANS)
    return StateError(
        f"after step {step} the ranks applied different means: {'; '.join(parts)}. Their parameters differ now: "
        "training cannot go on. Where backward() reaches no parameter, the means come with step() only: on every rank, "
        "call opt.synchronize() first, then change them"
    )


def _in_words(told: Mapping[int, int], ranks: Sequence[int], words: Mapping[int, str]) -> list[str]:
    those = {bits: [ranks[m] for m in sorted(told) if told[m] == bits] for bits in sorted(set(told.values()))}
    parts = [
        f"rank {', '.join(map(str, some))} {words.get(bits, 'did something else')}"
        for bits, some in those.items()
    ]
    if silent := [rank for member, rank in enumerate(ranks) if member not in told]:
        parts.append(f"rank {', '.join(map(str, silent))} did not say")
    return parts


def _told(
    control: ControlChannel, scope: str, own: int, ranks: Sequence[int], number: int, bits: int
) -> Mapping[int, int]:
    keys = [outcome_of(scope, number, member) for member in range(len(ranks))]
    told = {own: bits}
    deadline = monotonic() + ANSWER_SECONDS
    try:
        control.publish(keys[own], str(bits).encode())
        while len(told) < len(keys) and monotonic() < deadline:
            for other, key in enumerate(keys):
                value = None if other in told else control.lookup(key)
                if value is not None and (found := _parse(value)) is not None:
                    told[other] = found
            sleep(0.01)
    except TransportError:
        pass  # the error names what is known
    return told


def _parse(value: bytes) -> int | None:
    known = {str(bits).encode(): bits for bits in (*_IN_WORDS, *_OF_MEANS)}
    return known.get(bytes(value))
