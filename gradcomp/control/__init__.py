"""Controllers choose the compression level of every layer while training runs."""

from gradcomp.control.accordion import Accordion
from gradcomp.control.adaqs import AdaQS
from gradcomp.control.auto import Auto
from gradcomp.control.base import Controller, ControllerRun, Environment, Step
from gradcomp.control.bayes import Bayes
from gradcomp.control.fixed_plan import FixedPlan
from gradcomp.control.gravac import GraVAC
from gradcomp.control.kmeans import KMeans
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.linear import Linear
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic import Periodic
from gradcomp.control.registry import controller_from_string
from gradcomp.control.schedule import Schedule

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
    "controller_from_string",
]
