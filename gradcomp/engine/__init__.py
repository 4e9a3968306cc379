"""The background thread, the exchangers it serves, and what happens when a rank fails."""

from gradcomp.engine.engine import Engine
from gradcomp.engine.exchanger import Exchanger, Listener, Steering
from gradcomp.engine.watch import Watch

__all__ = ["Engine", "Exchanger", "Listener", "Steering", "Watch"]
