"""A background thread serves exchangers, and a watchdog ends their waits when a rank fails."""

from gradcomp.engine.engine import Engine
from gradcomp.engine.exchanger import Exchanger
from gradcomp.engine.terms import Controlled, Listener, Recorder, Terms
from gradcomp.engine.watchdog import Watchdog

__all__ = ["Controlled", "Engine", "Exchanger", "Listener", "Recorder", "Terms", "Watchdog"]
