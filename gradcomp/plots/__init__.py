"""Draws the figures of the command ``gradcomp``; they need the extra ``plot``."""

from gradcomp.plots.information import draw_information
from gradcomp.plots.profile import draw_profile

__all__ = ["draw_information", "draw_profile"]
