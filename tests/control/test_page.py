"""The controller that the page on controllers shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic import Periodic

PAGE = Path(__file__).resolve().parents[2] / "docs/controllers.md"


def test_the_controller_of_the_page_takes_the_next_level_of_every_layer() -> None:
    (code,) = re.findall(r"```python\n(@dataclass.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {
        each.__name__: each for each in (dataclass, Periodic, PeriodObservations, Decision)
    } | {"ClassVar": ClassVar, "np": np, "__name__": __name__}
    exec(code, names)
    observed: Any = SimpleNamespace(
        candidates=SimpleNamespace(choices=[("a", "b", "c"), ("a",), ("a", "b")]),
        current=np.array([2, 0, 0]),
        memory=np.array([1.5]),
    )
    decision = names["RoundRobin"](10).decide(observed)
    assert decision.choices.tolist() == [0, 0, 1]
    assert decision.memory.tolist() == [1.5]
