"""Controllers choose the compression level of every layer while training runs."""

from gradcomp.control.auto import Auto
from gradcomp.control.base import Controller, ControllerRun, Environment, Step
from gradcomp.control.gravac import GraVAC
from gradcomp.control.grouped import Bayes, KMeans, Linear
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic import Periodic
from gradcomp.control.registry import controller_from_string
from gradcomp.control.schedule import FixedPlan, Schedule
from gradcomp.control.two_levels import Accordion, AdaQS
from gradcomp.control.what_if import WhatIf

__all__ = [
    "Accordion",
    "AdaQS",
    "Auto",
    "Bayes",
    "Controller",
    "ControllerRun",
    "Decision",
    "Environment",
    "FixedPlan",
    "GraVAC",
    "KMeans",
    "LGreCo",
    "Linear",
    "PeriodObservations",
    "Periodic",
    "Schedule",
    "Step",
    "WhatIf",
    "controller_from_string",
]
