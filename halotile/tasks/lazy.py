"""torch and its collectives, imported with the first use of one of their names: plans and most commands need none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Lazy:
    """A module that is imported with its first attribute."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        self.__dict__ = module.__dict__  # later names are found there, as fast as in the module itself
        return getattr(module, name)


if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist
else:
    torch, dist = _Lazy("torch"), _Lazy("torch.distributed")

__all__ = ["dist", "torch"]
