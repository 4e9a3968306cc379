"""The rows of the comparison with other libraries: by method, each library's form of it beside gradcomp's."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from step_rows import DDP, IDEAL, Row

GRACE, EPFML, HOROVOD = "grace", "powersgd", "horovod"
#: What an option gives: the folder that its path must have.
PATHS = {GRACE: "grace_dl/dist", EPFML: "powersgd"}
MISSING_HOROVOD = "not installed: scripts/install_horovod.sh"


@dataclass(frozen=True)
class PeerRow(Row):
    """A row of one method. ``kind`` is that of a step benchmark's row, or the library.

    ``launch``: rows of one launch share their processes and alternate. Horovod's thread takes processor time from every
    row beside it, so its rows have a launch of their own.
    """

    method: str = ""
    launch: str = "main"


def _of(method: str, *rows: tuple[str, str, str, str], launch: str = "main") -> tuple[PeerRow, ...]:
    return tuple(
        PeerRow(key, title, kind, how, method=method, launch=launch) for key, title, kind, how in rows
    )


ROWS = (
    *_of(
        "float32",
        (IDEAL, "no exchange", "none", ""),
        (DDP, "DDP", "ddp", ""),
        ("none", "gradcomp none", "gradcomp", "none"),
    ),
    *_of(
        "float32",
        ("horovod-ideal", "no exchange, beside Horovod", "none", ""),
        ("horovod-ddp", "DDP, beside Horovod", "ddp", ""),
        ("horovod", "Horovod", HOROVOD, "none"),
        launch=HOROVOD,
    ),
    *_of("16 bits", ("horovod-fp16", "Horovod, fp16", HOROVOD, "fp16"), launch=HOROVOD),
    *_of(
        "16 bits",
        ("ddp-fp16", "DDP, fp16 hook", "ddp", "fp16"),
        ("fp16", "gradcomp fp16", "gradcomp", "fp16"),
        ("ddp-bf16", "DDP, bf16 hook", "ddp", "bf16"),
        ("bf16", "gradcomp bf16", "gradcomp", "bf16"),
    ),
    *_of(
        "quantise",
        ("grace-qsgd", "GRACE QSGD, 8 bits", GRACE, "qsgd"),
        ("8bit", "gradcomp 8 bits", "gradcomp", "quantize:bits=8"),
        ("4bit", "gradcomp 4 bits", "gradcomp", "quantize:bits=4"),
    ),
    *_of(
        "TopK 1%",
        ("grace-topk", "GRACE TopK", GRACE, "topk"),
        ("topk", "gradcomp TopK", "gradcomp", "topk:density=0.01"),
    ),
    *_of(
        "PowerSGD, rank 4",
        ("ddp-powersgd", "DDP, PowerSGD hook", "ddp", "powersgd"),
        ("epfml", "epfml/powersgd", EPFML, ""),
        ("grace-powersgd", "GRACE PowerSGD", GRACE, "powersgd"),
        ("powersgd", "gradcomp PowerSGD", "gradcomp", "powersgd:rank=4"),
    ),
    *_of(
        "signs",
        ("grace-signs", "GRACE EF-SignSGD", GRACE, "efsignsgd"),
        ("layer-signs", "gradcomp ScaledSign, one scale a layer", "gradcomp", "scaled_sign:bucket_size=none"),
        ("signs", "gradcomp ScaledSign", "gradcomp", "scaled_sign"),
    ),
)


def wrong_path(kind: str, path: Path) -> str | None:
    """Why the library of this kind cannot be imported from the path; None if it can."""
    folder = PATHS[kind]
    return None if (path / folder / "__init__.py").is_file() else f"there is no package {folder} in {path}"


def split(paths: Mapping[str, str | None]) -> tuple[dict[str, list[PeerRow]], dict[str, str]]:
    """The rows that can be run, by launch, and why each of the others cannot. ``paths``: by kind, as given."""
    reasons = {kind: f"not given: --{kind}" for kind in PATHS if paths.get(kind) is None}
    if importlib.util.find_spec("horovod") is None:
        reasons[HOROVOD] = MISSING_HOROVOD
    missing = {row.key: reasons[row.kind] for row in ROWS if row.kind in reasons}
    launches: dict[str, list[PeerRow]] = {}
    for row in ROWS:
        if row.key not in missing:
            launches.setdefault(row.launch, []).append(row)
    # Without a peer's row there is nothing that the references of a launch are beside.
    needed = {name: rows for name, rows in launches.items() if any(not is_reference(row) for row in rows)}
    missing |= {row.key: reasons[name] for name in launches.keys() - needed for row in launches[name]}
    return needed, missing


def is_reference(row: Row) -> bool:
    """Whether rows of its launch are compared with this one."""
    return row.kind == "none" or (row.kind, row.how) == ("ddp", "")
