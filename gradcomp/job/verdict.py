"""Says after 50 steps what compression gains here, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

#: Exposed communication below this share of a step is not worth another setting.
_WORTH = 0.05


@dataclass(frozen=True)
class Measured:
    """Holds averages of one step: its seconds, what a rank sent, and how long it waited for the exchange.

    ``half_bytes``, ``half_exposed_seconds``: the same for a bfloat16 wire, predicted at ``seconds_per_byte``.
    ``latency_seconds``: the time of a small message.
    """

    step_seconds: float
    sent_bytes: float
    exposed_seconds: float
    half_bytes: float
    half_exposed_seconds: float
    seconds_per_byte: float
    latency_seconds: float

    @property
    def exposed(self) -> str:
        """Return as text how much of a step is exposed communication."""
        return f"{1e3 * self.exposed_seconds:.1f} of {1e3 * self.step_seconds:.1f} ms a step are exposed communication"

    @property
    def worth(self) -> bool:
        """Return whether fewer bytes could shorten the step by a share that is worth it."""
        return min(self.exposed_seconds, self._bytes_seconds) > _WORTH * self.step_seconds

    @property
    def leave_it(self) -> str:
        """Return the advice where it is not worth it; what is exposed all the same has other causes than bytes."""
        advice = "fewer bytes would hardly shorten it, leave it so"
        if self.exposed_seconds <= _WORTH * self.step_seconds:
            return advice
        return (
            f"the bytes take {1e3 * self._bytes_seconds:.2f} of them, the rest is latency "
            f"({1e3 * self.latency_seconds:.2f} ms a message) and waiting for other ranks; {advice}, and exchange less "
            "often: larger batches, or gradients of several added up"
        )

    @property
    def _bytes_seconds(self) -> float:
        return self.sent_bytes * self.seconds_per_byte


def verdict(measured: Measured, compressed: bool) -> str:
    """Return as text what was found, and what to do."""
    if not compressed:
        return f"uncompressed; {measured.exposed}: " + (
            'compare with compression="quantize:bits=4", or let compression="auto" choose'
            if measured.worth
            else measured.leave_it
        )
    half = f"a bfloat16 wire would send {measured.half_bytes / 1e6:.3f} MB"
    if measured.sent_bytes >= 0.95 * measured.half_bytes:
        return f"{half}; {measured.exposed}: " + (
            'compare with compression="quantize:bits=4"' if measured.worth else measured.leave_it
        )
    gain_ms = 1e3 * (measured.half_exposed_seconds - measured.exposed_seconds)
    if gain_ms <= 0:
        return (
            f"{half}; compression gains nothing against it here; {measured.exposed}, but fewer bytes do not "
            f"shorten it (a message has {1e3 * measured.latency_seconds:.2f} ms of latency): compare with "
            'compression="bf16" and "none"'
        )
    return (
        f"{half}; about {gain_ms:.1f} ms a step are gained against it (estimate at "
        f"{8e-9 / measured.seconds_per_byte:.2f} Gbit/s); {measured.exposed}: "
        + ("a higher ratio may gain more" if measured.worth else "keep it")
    )
