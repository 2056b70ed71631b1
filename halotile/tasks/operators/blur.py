"""Blur: convolution with a compact kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.convolution.overlap_save import EngineName, engine_for
from halotile.tasks.operators.base import OperatorKind, Shape
from halotile.tasks.operators.common.kernel import Frame, Frames, Seen, Spread
from halotile.tasks.options import check_whole

# Rim rules by the names of boundaries that are usual in imaging.
RULES = {"circular": "periodic", "reflect": "mirror", "replicate": "nearest", "zero": "constant", "valid": "cut"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Blur:
    """``y = k * x``, or every ``factor``-th pixel of it.

    Parameters
    ----------
    kernel : ndarray, shape (rows, columns) or (planes, rows, columns)
        The kernel, its centre at (rows - 1) // 2, (columns - 1) // 2 from its end, as in deepinv.
    boundary : str
        ``circular``, ``reflect`` (about the edge pixel), ``replicate``, ``zero``, or ``valid``: the
        measurement is smaller by the kernel size.
    factor : int
        Downsampling.
    engine : str
        ``direct``: sums over the taps of the kernel, with the bits of torch's convolution; ``fft``: Fourier transforms of
        cells, faster for large kernels and within 1e-6 (root mean square, single precision) of the
        direct sum; ``auto``: chosen by :meth:`with_engine`, and ``direct`` until then. With each engine any
        region has the bits of the whole.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> blur = Blur(kernel=np.ones((1, 3)) / 3, boundary="replicate")
    >>> read_all(blur.forward(InMemory(np.array([[0.0, 3.0, 9.0]])))).tolist()
    [[1.0, 4.0, 7.0]]
    """

    name: ClassVar[str] = "blur"
    kind: ClassVar[OperatorKind] = "local"

    kernel: NDArray[Any]
    boundary: str = "circular"
    factor: int = 1
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        if self.boundary not in RULES:
            raise ConfigError(f"boundary is {self.boundary!r}: write one of {', '.join(RULES)}.")
        if self.engine not in get_args(EngineName):
            raise ConfigError(f"engine is {self.engine!r}: write one of {', '.join(get_args(EngineName))}.")
        check_whole("factor", self.factor, 1)
        if self.engine == "fft" and self.factor != 1:
            raise ConfigError(
                f"engine is 'fft' and factor {self.factor}: the transforms would also compute the pixels that are left "
                "out. Write engine: direct."
            )
        self._check_kernel()

    def _check_kernel(self) -> None:
        """Refuse a kernel of a wrong shape, that is not real and finite, or that is zero."""
        if self.kernel.ndim not in (2, 3) or 0 in self.kernel.shape:
            raise ConfigError(
                f"kernel has shape {self.kernel.shape}: write an array of rows and columns, or one such kernel for each plane."
            )
        if self.kernel.dtype.kind not in "biuf":
            raise ConfigError(f"kernel is {self.kernel.dtype}: a blur adds light. Write real numbers.")
        if bad := int(np.count_nonzero(~np.isfinite(self.kernel))):
            raise ConfigError(
                f"kernel has {bad} of {self.kernel.size} numbers that are NaN or infinite. Write finite ones."
            )
        if not self.kernel.any():
            raise ConfigError("kernel is 0 everywhere: the measurement would be empty. Write another kernel.")

    @property
    def reach(self) -> int:
        """Half the kernel size; all of it for ``valid``, where a measurement pixel is at the first pixel of the kernel."""
        taps = int(max(self.kernel.shape[-2:]))
        return taps - 1 if self.boundary == "valid" else taps // 2

    def with_engine(self, dtype: np.dtype[Any], exact: bool) -> Blur:
        """The blur with ``engine: auto`` decided, for computations in this dtype.

        ``direct`` if the job must be exact, the kernel is small, or pixels are left out.

        >>> blur = Blur(kernel=np.ones((31, 31)))
        >>> blur.with_engine(np.dtype("float32"), exact=False).engine
        'fft'
        """
        if self.engine != "auto":
            return self
        return replace(self, engine=engine_for(self.kernel.shape, dtype, exact or self.factor > 1))

    def frames(self, image: Shape) -> Frames:
        """Positions of the measurement pixels in the image, along y and x."""
        y, x = (self._frame(n, taps) for n, taps in zip(image[-2:], self.kernel.shape[-2:], strict=True))
        return y, x

    def _frame(self, length: int, taps: int) -> Frame:
        rule = RULES[self.boundary]
        before = 0 if rule == "cut" else (taps - 1) // 2
        seen = length - taps + 1 if rule == "cut" else length
        if seen < 1 or (rule == "mirror" and taps // 2 >= length):
            raise ConfigError(
                f"the kernel is {taps} pixels long and the image {length}: with boundary {self.boundary} the kernel must be "
                "shorter. Crop the kernel, or write boundary: zero."
            )
        if rule == "periodic" and length % self.factor:
            raise ConfigError(
                f"the image is {length} pixels long, which is not a multiple of the factor {self.factor}: with boundary circular "
                "it must be. Crop the image, or write another boundary."
            )
        return Frame(length, -(-seen // self.factor), taps, self.factor, before, rule)

    def measured(self, image: Shape) -> Shape:
        planes = len(self._kernels)
        if planes > 1 and (len(image) < 3 or image[-3] != planes):
            has = f"{image[-3]} planes" if len(image) > 2 else "no axis in front of y and x"
            raise ConfigError(
                f"the kernel has shape {self.kernel.shape}, one for each of {planes} planes, but the image of shape {image} "
                f"has {has}. Write a kernel of rows and columns, which is used for every plane, or {planes} planes of data."
            )
        return (*image[:-2], *(frame.count for frame in self.frames(image)))

    def forward(self, image: Readable) -> Seen:
        return Seen(image, self._kernels[:, ::-1, ::-1], self.frames(image.shape), self.engine)

    def adjoint(self, measurement: Readable, image: Shape) -> Spread:
        """``A^T y``: a convolution with the flipped kernel."""
        return Spread(measurement, self._kernels[:, ::-1, ::-1], self.frames(image), self.engine)

    def squared(self, image: Shape) -> tuple[Blur, Region]:
        """The operator with the squares of the entries, and the part of an image where its adjoint has them: values beyond the rim are not folded there."""
        edge = 0 if self.boundary in ("circular", "zero", "valid") else self.reach + 1
        inner = Region.whole(image).widen(-edge)
        return replace(self, kernel=np.square(self.kernel, dtype=np.float64), engine="direct"), inner

    @property
    def _kernels(self) -> NDArray[Any]:
        return self.kernel if self.kernel.ndim == 3 else self.kernel[None]


OPERATOR = Blur
