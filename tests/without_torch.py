"""Who imports this has no PyTorch, as where it is not installed."""

from __future__ import annotations

import sys


class _Hide:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"{name} is hidden")


sys.meta_path.insert(0, _Hide())
