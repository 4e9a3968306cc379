"""Refuses compressors that learn where they cannot."""

from __future__ import annotations

from gradcomp.compress import Policy
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.devices import HOST, Device


def refusal(config: Config, policy: Policy, device: Device = HOST, step: int = 0) -> ConfigError | None:
    """Return why a compressor cannot learn what it has to, or None if it can or none of them learns.

    ``device`` holds the gradients. The compressor would begin in ``step``.
    """
    learning = [c for c in policy.compressors if c.traits.learns]
    why = ""
    if not learning:
        return None
    if device.driver is not None:
        why = "it works on gradients in the host's memory, not on a GPU"
    elif step and any(c.at_step(step).traits.learns for c in learning):
        why = f"its steps are counted from step 0, and this is step {step}: wrap it in gc.Warmup(..., steps={step})"
    elif config.deterministic and any(c.traits.by_times for c in learning):
        why = (
            "deterministic=True: by default its train_share depends on measured times: set train_share to 1/m"
        )
    return ConfigError(f"{learning[0].to_string()}: {why}") if why else None
