"""Where there is a GPU, the tests of all bodies are tests of its kernels as well: `make test-gpu` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels import gpu

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if gpu.problem() is None:
        for item in items:
            module = vars(item.getparent(pytest.Module).obj) if HERE in item.path.parents else {}
            if module.keys() & {"standin", "ORDERS"}:
                item.add_marker(pytest.mark.gpu)
