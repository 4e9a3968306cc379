"""The settings of a process: one frozen object, the only reader of ``GRADCOMP_*`` variables.

Precedence: argument, then environment, then the TOML file that ``GRADCOMP_CONFIG`` names, then the default.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import AUTO, names, parse
from gradcomp.core.strings import closest, parses
from gradcomp.core.what_if import parse as ratios_of

PREFIX = "GRADCOMP_"
_SECRET = PREFIX + "SECRET"
_LEAST_SECRET_CHARACTERS = 16

#: Default elements of an exchange bucket: it fits into a CPU's cache, or is large enough for a GPU's launches.
HOST_SLICE, DEVICE_SLICE = 1 << 20, 1 << 24

#: The least elements that ranks choose for an exchange bucket on a slow link.
FINE_SLICE = 1 << 18

#: Settings of earlier versions, with what to do instead.
_REMOVED = {
    "residuals": "residuals are float32; leave the setting out, or choose 8 or 4 bits, which keep none by default"
}

#: Names of transports; a plus joins two levels.
TRANSPORTS = (
    AUTO,
    "torch",
    "mpi",
    "shm",
    "horovod",
    "nccl",
    "shm+torch",
    "shm+mpi",
    "nccl+torch",
    "nccl+mpi",
)


def _setting(
    default: Any,
    doc: str,
    check: Callable[[Any], bool] = lambda _: True,
    rule: str | Callable[[], str] = "a boolean",
    *,
    shared: bool = False,
) -> Any:
    """Returns a dataclass field with its documentation and its rule; ``shared`` settings must agree on all ranks.

    A rule that lists names which are registered later is a function.
    """
    written = rule if callable(rule) else lambda: rule
    return field(default=default, metadata={"doc": doc, "check": check, "rule": written, "shared": shared})


def _positive(value: Any) -> bool:
    return bool(value > 0)


def _not_negative(value: Any) -> bool:
    return bool(value >= 0)


def _among(*words: str) -> tuple[Callable[[Any], bool], str]:
    """Returns the check and the rule of a setting that is one of these words."""
    return lambda value: value in words, f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True)
class Config:
    """Settings that are not part of a compressor. Each is an argument of ``init`` and a ``GRADCOMP_*`` variable."""

    seed: int = _setting(
        0, "Seed of all random draws.", lambda v: 0 <= v < 2**64, "in [0, 2**64)", shared=True
    )
    slice_elements: int = _setting(
        0,
        "Most elements of one exchange bucket; uncompressed layers count a quarter. A larger layer is cut into slices. "
        "0: 16777216 if the gradients of all ranks are on GPUs, else 1048576, or 524288 or 262144 where the link "
        "between hosts is slow.",
        lambda v: v == 0 or v >= 8,
        "at least 8, or 0",
        shared=True,
    )
    overlap: bool = _setting(True, "Exchange while backward runs; off: only after it.", shared=True)
    reduction: str = _setting(
        "sra",
        "How codes are summed over ranks: see the page on algorithms; auto takes the cheapest.",
        lambda v: parses(v, parse),
        lambda: f"one of {', '.join(names())} and {AUTO}; parameter_server:servers=2 for two servers",
        shared=True,
    )
    reorder: bool = _setting(
        True,
        "Re-order exchange buckets once, by the order in which rank 0's gradients arrived in its first step, or under "
        "a communication hook its second.",
        shared=True,
    )
    cold_after_steps: int = _setting(
        3, "Steps without a gradient on any rank after which a layer moves to the last exchange buckets.", _positive,
        "positive", shared=True,
    )  # fmt: skip
    statistics_every_steps: int = _setting(
        100, "Steps between two reductions of the statistics, each with a log line; 0 for never.", _not_negative,
        "not negative", shared=True,
    )  # fmt: skip
    fingerprint_steps: int = _setting(
        5, "First steps after which all parameters are compared across ranks; 0 for none.", _not_negative,
        "not negative", shared=True,
    )  # fmt: skip
    fingerprint_every_steps: int = _setting(
        500,
        "Steps between further comparisons of all parameters; 0 for none. 0 also ends the comparison of a sample in "
        "each step.",
        _not_negative,
        "not negative",
        shared=True,
    )  # fmt: skip
    checksums: bool = _setting(
        True,
        "A CRC-32C in every message of bytes, verified before it is decoded; never over NCCL, nor in sums.",
        shared=True,
    )
    deterministic: bool = _setting(
        False,
        "Apply a controller's decision a fixed number of steps after its work began, so that runs are repeatable.",
        shared=True,
    )
    transport: str = _setting(
        AUTO,
        "Transport of gradients: torch.distributed, MPI, shared memory on one host, Horovod, NCCL, or shared memory "
        "or NCCL on each host and another between them; auto: the one that the ranks' rendezvous used.",
        lambda v: v in TRANSPORTS,
        f"one of {', '.join(TRANSPORTS)}",
    )
    stall_warning_seconds: float = _setting(
        10.0, "Wait after which a rank logs what it waits for.", _positive, "positive"
    )
    timeout_seconds: float = _setting(
        600.0, "Wait after which a rank aborts the job with a TransportError.", _positive, "positive"
    )
    store: str = _setting(
        "",
        "Where `python -m gradcomp store` listens, as host:port. The process belongs to an elastic job then, whose "
        "ranks may die and come; see the page on elastic training. Empty: it does not.",
        lambda v: v == "" or v.rpartition(":")[2].isdecimal(),
        "host:port, or empty",
    )
    min_ranks: int = _setting(
        1,
        "The least ranks with which an elastic job trains; it waits for them.",
        _positive,
        "positive",
        shared=True,
    )
    max_ranks: int = _setting(
        0,
        "The most ranks with which an elastic job trains; 0: any number. Further processes wait.",
        _not_negative,
        "not negative",
        shared=True,
    )
    join_window_seconds: float = _setting(
        2.0,
        "How long an elastic job waits for a further process before it begins.",
        _not_negative,
        "not negative",
    )
    trace_spans: int = _setting(4096, "Spans kept for the trace; 0 for none.", _not_negative, "not negative")
    timeline: str = _setting(
        "",
        "Path of a timeline of the whole run, as start_timeline writes it; empty: none.",
        lambda v: "\0" not in v,
        "a path, or empty",
    )
    run_log: str = _setting(
        "",
        "Path of a JSONL file to which rank 0 appends every change of plan, and where the time of steps went; empty: "
        "none.",
        lambda v: "\0" not in v,
        "a path, or empty",
    )
    run_log_every_steps: int = _setting(
        10,
        "Steps between two lines of the run log about steps, for which the ranks gather their times; 0: it has only "
        "plans.",
        _not_negative,
        "not negative",
        shared=True,
    )
    backend_compression: str = _setting(
        "quantize:bits=4",
        'Compressor of every DistributedDataParallel over init_process_group(backend="gradcomp"), in its string form.',
        bool,
        "a compressor",
        shared=True,
    )
    kernels: str = _setting(
        "auto",
        "Kernels: auto (the compiled ones, an error without them), native or reference (NumPy).",
        *_among("auto", "native", "reference"),
    )
    threads: int = _setting(
        0,
        "Threads that share the work of a codec's kernel on the host, at most the rank's share of the host's cores. "
        "0: that share less the framework's own threads, at least 1.",
        _not_negative,
        "not negative",
    )
    what_if: str = _setting(
        "",
        "Ratios of a what-if run, as 1,2,4,8,16: fake compression replaces the compression and the controller of every "
        "wrapper, and rank 0 logs the step time of each ratio. For compress_fsdp, weights x gradients as "
        "1,2,4x1,2,4. Training is worthless. Empty: none.",
        lambda v: v == "" or parses(v, ratios_of),
        "ratios in [1, 2**30] or inf, all different, as 1,2,4,8 or 1,2,4x1,2,4; or empty",
        shared=True,
    )
    what_if_save: bool = _setting(
        False,
        "Let runs with fake compression save checkpoints, whose model is worthless; else they refuse.",
        shared=True,
    )
    log_level: str = _setting(
        "info",
        "Level of the gradcomp logger unless the program has set one.",
        *_among("debug", "info", "warning", "error"),
    )
    isa: str = _setting(
        "auto",
        "Instruction set of the compiled kernels: auto, avx512, avx2 or baseline.",
        *_among("auto", "avx512", "avx2", "baseline"),
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not item.metadata["check"](value):
                raise ConfigError(f"setting {item.name} must be {item.metadata['rule']()}, got {value!r}")
        if self.stall_warning_seconds > self.timeout_seconds:
            object.__setattr__(self, "stall_warning_seconds", self.timeout_seconds)

    @staticmethod
    def resolve(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """Returns settings from arguments, environment and file, in this order; ``None`` means "not given".

        Raises ConfigError for an unknown argument or file key and for an invalid value. Unknown ``GRADCOMP_*``
        variables are left to :func:`unknown_variables`, since they may belong to another version.
        """
        environ = os.environ if environ is None else environ
        types = {item.name: type(item.default) for item in dataclasses.fields(Config)}
        values: dict[str, Any] = {}
        path = environ.get(PREFIX + "CONFIG")
        if path:
            values.update(_from_file(Path(path), types))
        for variable, text in environ.items():
            name = variable.removeprefix(PREFIX).lower()
            if not variable.startswith(PREFIX):
                continue
            refuse_removed(name, text, variable)
            if name in types:
                values[name] = _parse(variable, text, types[name])
        for name, value in arguments.items():
            refuse_removed(name, value)
            if name not in types:
                raise ConfigError(f"unknown setting {name!r}{_closest(name, types)}")
            if value is not None:
                values[name] = _coerce(f"argument {name}", value, types[name])
        return Config(**values)

    def shared(self) -> dict[str, Any]:
        """Returns the settings that must agree on all ranks."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["shared"]}

    def settings(self) -> dict[str, Any]:
        """Returns all settings by name, shared ones and others."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from their default."""
        default = Config()
        return {name: value for name, value in self.settings().items() if value != getattr(default, name)}

    @staticmethod
    def table() -> str:
        """Returns the settings as a Markdown table (``docs/configuration.md`` holds it; a test compares)."""
        rows = ["| variable | default | meaning | must be |", "|---|---|---|---|"]
        for item in dataclasses.fields(Config):
            meta = item.metadata
            default = str(item.default).lower() if isinstance(item.default, bool) else item.default
            cell = "" if default == "" else f"`{default}`"
            rows.append(f"| `{PREFIX}{item.name.upper()}` | {cell} | {meta['doc']} | {meta['rule']()} |")
        return "\n".join(rows)


def refuse_removed(name: str, value: object, where: str = "") -> None:
    """Raise ConfigError for a value of a setting that earlier versions had; the text says what to do instead."""
    if name in _REMOVED and value is not None:
        raise ConfigError(f"{where or name}={value!r}: this setting was removed; {_REMOVED[name]}")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns a warning for each unknown variable with our prefix, with the name that was probably meant."""
    names = ["config", "secret", *(item.name for item in dataclasses.fields(Config))]
    warnings = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in names:
            match = closest(name, names)
            meant = f": did you mean {PREFIX}{match.upper()}?" if match else ""
            warnings.append(f"unknown variable {variable} is ignored{meant}")
    return warnings


def secret(environ: Mapping[str, str]) -> bytes:
    """Returns ``GRADCOMP_SECRET``, which signs what the ranks send each other at start-up; empty if it is not set.

    It is not a setting, so that it is neither shown nor logged nor read from a file. Raises ConfigError if it is too
    short.
    """
    text = environ.get(_SECRET, "").strip()
    if 0 < len(text) < _LEAST_SECRET_CHARACTERS:
        raise ConfigError(
            f"{_SECRET} has {len(text)} characters and needs {_LEAST_SECRET_CHARACTERS}: set it to a random text, "
            "such as `openssl rand -hex 32` prints"
        )
    return text.encode(errors="surrogateescape")


def _closest(name: str, types: Mapping[str, type]) -> str:
    match = closest(name, types)
    return f" (did you mean {match}?)" if match else ""


def _from_file(path: Path, types: Mapping[str, type]) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {PREFIX}CONFIG={path}: {error}") from error
    for name, value in data.items():
        refuse_removed(name, value, f"{path}: {name}")
        if name not in types:
            raise ConfigError(f"unknown setting {name!r} in {path}{_closest(name, types)}")
    return {name: _coerce(f"{name} in {path}", value, types[name]) for name, value in data.items()}


def _parse(variable: str, text: str, kind: type) -> Any:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{variable} must be a boolean (1/0, true/false), got {text!r}")
    try:
        return kind(text.strip())
    except ValueError as error:
        raise ConfigError(f"{variable} must be of type {kind.__name__}, got {text!r}") from error


def _coerce(where: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be of type {kind.__name__}, got {value!r}")
    return value
