"""Draws the figures of the command ``gradcomp``; they need the extra ``plot``."""

from gradcomp.contrib.figures import draw_information, draw_profile

__all__ = ["draw_information", "draw_profile"]
