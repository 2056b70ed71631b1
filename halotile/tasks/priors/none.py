"""No prior."""

from dataclasses import dataclass
from typing import ClassVar

from halotile.storage.rim import Readable
from halotile.tasks.priors.base import Prior


@dataclass(frozen=True, kw_only=True)
class NoPrior(Prior):
    """``g = 0``."""

    name: ClassVar[str] = "none"
    is_there: ClassVar[bool] = False

    def prox(self, image: Readable, step: float) -> Readable:
        """``x`` itself."""
        return image

    def slope(self, image: Readable) -> None:
        """None: there is no slope."""
        return None


PRIOR = NoPrior
