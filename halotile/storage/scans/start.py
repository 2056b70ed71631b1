"""What a reconstruction begins with, from the result of an earlier one or from a file with an object or a probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.scans.hdf5 import dataset_in, opened, reading
from halotile.storage.scans.scan import digest_of_arrays

PROCESS = "entry_1/process_1"


@dataclass(frozen=True, eq=False)
class StartValues:
    """Values to begin with; None: the first guess. Values of patterns are in the order of the file that the scan came from."""

    object: NDArray[Any] | None = None  # complex
    obj: NDArray[Any] | None = None  # same with margins of any width around the scan, as CDTools writes it
    probe: NDArray[Any] | None = None  # complex; beside an object in roots of counts, alone in any unit
    first_pixel: NDArray[Any] | None = None  # place of each pattern on the object in pixels
    amplitude: NDArray[Any] | None = None  # amplitude of the beam, relative
    background: NDArray[Any] | None = None  # counts without a beam
    variations: NDArray[Any] | None = None  # modes that are added to the first one
    shares: NDArray[Any] | None = None  # their shares in each pattern

    OF_ANY: ClassVar[dict[str, str]] = {name: name for name in ("object", "obj", "probe")}
    # left alone in other files, which may have them in another order
    OF_RESULTS: ClassVar[dict[str, str]] = {
        "first_pixel": f"{PROCESS}/first_pixel",
        "amplitude": f"{PROCESS}/amplitude",
        "background": "entry_1/instrument_1/detector_1/background",
        "variations": f"{PROCESS}/probe_variations",
        "shares": f"{PROCESS}/probe_shares",
    }

    @classmethod
    def read(cls, path: str) -> StartValues:
        """Read what a file has of them."""
        with opened(path) as file, reading(path):
            is_result = cls.OF_RESULTS["first_pixel"] in file
            places = cls.OF_ANY | (cls.OF_RESULTS if is_result else {})
            there = {name: dataset_in(file, place, kinds="iufc") for name, place in places.items()}
            if is_result:
                del there["obj"]  # its object by another name
            found = {name: np.asarray(each[()]) for name, each in there.items() if each is not None}
        if not cls.OF_ANY.keys() & found.keys():
            raise InputError(f"{path} has neither an object nor a probe to begin with, under these names.")
        for name, values in found.items():
            if not np.isfinite(values).all():
                raise InputError(f"{path}: its {name} has values that are not finite.")
        for name in cls.OF_ANY.keys() & found.keys():
            if not found[name].any():
                raise InputError(
                    f"{path}: its {name} is 0 everywhere, which no epoch would change. Give another one, or leave it out."
                )
        if "obj" in found and (found["obj"].ndim != 2 or "object" in found):
            raise InputError(
                f"{path}: its obj has shape {list(found['obj'].shape)}, and a start is one object, (rows, columns). Write it as object, or leave the other out."
            )
        if "probe" in found and found["probe"].ndim == 2:
            found["probe"] = found["probe"][None]
        return cls(**found)

    def check(self, path: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse values of other shapes than these; a probe has any number of modes."""
        for name, wanted in shapes.items():
            values = getattr(self, name)
            found = () if values is None else values.shape[1:] if name == "probe" else values.shape
            if values is not None and found != wanted:
                raise InputError(
                    f"{path}: its {name} has shape {list(values.shape)}, and this reconstruction has {list(wanted)}. Begin with a result of the same "
                    "scan, margin, oversampling and variations, or leave input.start out."
                )

    def digest(self) -> str:
        """Digest of every value."""
        return digest_of_arrays(vars(self))
