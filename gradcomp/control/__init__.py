"""Controllers: the level of every layer, chosen while training runs."""

from gradcomp.control.base import Controller, Pilot, Setting, Step
from gradcomp.control.periodic import Decision, Periodic, Seen

__all__ = ["Controller", "Decision", "Periodic", "Pilot", "Seen", "Setting", "Step"]
