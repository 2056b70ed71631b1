"""A deepinv linear physics on NumPy arrays."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from halotile.errors import ConfigError
from halotile.registry import optional
from halotile.storage.rim import Array
from halotile.tasks.lazy import torch
from halotile.tasks.operators.base import Shape, working_dtype

# Largest deviation of deepinv's adjoint from the transpose; beyond it the derivative of A is used.
ADJOINT_TOLERANCE = 1e-5

# Exceptions of a physics for an image that it does not accept.
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class Physics:
    """A physics object called with NumPy arrays.

    Images have the axes (..., C, H, W), or (H, W) for one channel; so have measurements that are images.

    ``module``: not changed: it is copied to another precision or device.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._modules: dict[Any, Any] = {}
        self._measured: dict[Shape, Shape] = {}
        self._trusts: dict[Shape, bool] = {}

    def forward(self, image: Array) -> Array:
        tensor = _tensor(image, batched(image.shape))
        with torch.no_grad():
            result = self._call("A", tensor)
        if not isinstance(result, torch.Tensor) or result.is_complex():
            raise ConfigError(
                f"{type(self.module).__name__} returns {type(result).__name__} of {getattr(result, 'dtype', 'several parts')}: "
                "one measurement of real numbers is needed. Write each part of a stack as a separate operator."
            )
        self._measured[image.shape] = tuple(result.shape)
        shape = unbatched(image.shape, self._measured[image.shape])
        pixels: Array = result.to(tensor.dtype).reshape(shape).numpy()
        return pixels

    def adjoint(self, measurement: Array, image: Shape) -> Array:
        """``A^T y``: deepinv's adjoint if it is the transpose, else the derivative of A."""
        if image not in self._trusts:
            self._trusts[image] = self._is_adjoint(image)
        tensor = _tensor(measurement, self._measured[image])
        transpose = self._own_adjoint if self._trusts[image] else self._derivative
        pixels: Array = transpose(tensor, batched(image)).to(tensor.dtype).reshape(image).numpy()
        return pixels

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement, found by measuring an image of zeros."""
        if image not in self._measured:
            try:
                self.forward(np.zeros(image, np.float32))
            except REFUSALS as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{type(self.module).__name__} of deepinv does not accept an image of {' × '.join(map(str, image))}: {error}."
                ) from error
        return unbatched(image, self._measured[image])

    def _call(self, method: str, tensor: torch.Tensor) -> Any:
        """Call a method; in single precision if it does not accept double."""
        try:
            return getattr(self._module(tensor.dtype), method)(tensor)
        except RuntimeError:
            if tensor.dtype != torch.float64:
                raise
        return getattr(self._module(torch.float32), method)(tensor.float()).double()

    def _module(self, dtype: Any) -> Any:
        """The physics for numbers of this dtype, on the CPU."""
        if dtype not in self._modules:
            numbers = [t for t in _tensors(self.module) if t.is_floating_point() or t.is_complex()]
            fits = all(t.device.type == "cpu" and t.dtype in (dtype, dtype.to_complex()) for t in numbers)
            module = self.module if fits else copy.deepcopy(self.module).cpu()
            self._modules[dtype] = _cast(module, double=dtype == torch.float64)
        return self._modules[dtype]

    def _own_adjoint(self, measurement: torch.Tensor, image: Shape) -> torch.Tensor:
        """deepinv's adjoint."""
        with torch.no_grad():
            result: torch.Tensor = self._call("A_adjoint", measurement)
        return result

    def _derivative(self, measurement: torch.Tensor, image: Shape) -> torch.Tensor:
        """The transposed derivative of A."""
        with torch.enable_grad():
            origin = torch.zeros(image, dtype=measurement.dtype, requires_grad=True)
            result = self._call("A", origin)
            (gradient,) = torch.autograd.grad(result, origin, measurement)
        return gradient

    def _is_adjoint(self, image: Shape) -> bool:
        """Return whether deepinv's adjoint is the transpose of A, on a random pair."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal(image).astype(np.float32)
        ax = self.forward(x)
        y = rng.standard_normal(ax.shape).astype(np.float32)
        try:
            transposed = self._own_adjoint(_tensor(y, self._measured[image]), batched(image))
            aty = transposed.reshape(image).numpy()
        except REFUSALS:  # for some kernels and boundaries
            return False
        gap = abs(np.vdot(ax.astype(float), y) - np.vdot(x.astype(float), aty))
        return bool(gap <= ADJOINT_TOLERANCE * np.linalg.norm(ax) * np.linalg.norm(y))


def _tensors(module: Any) -> list[torch.Tensor]:
    """The parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def _cast(module: Any, *, double: bool) -> Any:
    """Cast a module to double or single precision, with its complex tensors, which torch leaves out."""
    module = module.double() if double else module.float()
    for tensor in _tensors(module):
        if tensor.is_complex():
            tensor.data = tensor.data.cdouble() if double else tensor.data.cfloat()
    return module


def batched(image: Shape) -> Shape:
    """The shape (B, C, H, W) of an image.

    >>> batched((8, 9)), batched((3, 8, 9)), batched((5, 2, 3, 8, 9))
    ((1, 1, 8, 9), (1, 3, 8, 9), (10, 3, 8, 9))
    """
    front = (1, 1, *image)[-4:] if len(image) < 4 else image
    return (int(np.prod(front[:-3])), *front[-3:])


def unbatched(image: Shape, measurement: Shape) -> Shape:
    """The shape of a measurement without the axes that the image does not have.

    >>> unbatched((8, 9), (1, 1, 4, 5)), unbatched((3, 8, 9), (1, 20)), unbatched((5, 2, 3, 8, 9), (10, 3, 4, 5))
    ((4, 5), (20,), (5, 2, 3, 4, 5))
    """
    rest = measurement[1:]
    if len(image) == 2 and len(rest) == 3 and rest[0] == 1:
        rest = rest[1:]
    return (*image[:-3], *rest)


def build(physics: str | object, options: Mapping[str, Any]) -> Any:
    """Return the physics object, given or built from the name of its class.

    Random numbers of the constructor, such as a mask, are the same in every process.
    """
    kinds = import_deepinv()
    if not isinstance(physics, str):
        module = physics
    else:
        kind = _class(kinds, physics)
        _check_options(kinds, kind, options)
        module = _construct(kind, {key: _option(key, value) for key, value in options.items()})
    if not isinstance(module, kinds.LinearPhysics) or isinstance(module, kinds.StackedLinearPhysics):
        raise ConfigError(
            f"physics is a {type(module).__name__}: it must be one LinearPhysics. Write each operator of a stack by itself."
        )
    return module


def import_deepinv() -> Any:
    """Import ``deepinv.physics``, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optional("the operator deepinv needs the package deepinv", "deepinv.physics", "'halotile[deepinv]'")


def _class(kinds: Any, name: str) -> Any:
    """The physics class of this name."""
    classes = {key: kind for key, kind in vars(kinds).items() if isinstance(kind, type)}
    known = {key: kind for key, kind in classes.items() if issubclass(kind, kinds.LinearPhysics)}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"physics is {name!r}, which is not a linear physics of deepinv. {hint}Write one of {', '.join(sorted(known))}."
    )


def _check_options(kinds: Any, kind: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that no constructor takes, which deepinv would drop with a warning."""
    known = _parameters(kinds, kind)
    for key in options if known else ():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            own = [name for name in inspect.signature(kind).parameters if name in known]
            raise ConfigError(
                f"options has {key!r}, which physics {kind.__name__} does not take. "
                + (f"Did you mean {near[0]!r}?" if near else f"Write some of {', '.join(own)}.")
            )


def _parameters(kinds: Any, kind: Any) -> list[str]:
    """Parameters of the constructors of a class, its own first; empty if they cannot be determined.

    A constructor with ``**kwargs`` passes on unknown arguments to that of its base class; that of Physics drops them.
    """
    known: dict[str, None] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(base.__init__).parameters.values())[1:]
        known |= dict.fromkeys(p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if base is kinds.Physics or not any(p.kind == p.VAR_KEYWORD for p in own):
            return list(known)
    return []


def _construct(kind: Any, options: dict[str, Any]) -> Any:

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return kind(**options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"physics {kind.__name__} cannot be built with the options {sorted(options)}: {error}. See its page in deepinv's documentation."
            ) from error


def _option(key: str, value: Any) -> Any:
    """Convert an option for deepinv: arrays, their files and nested lists to tensors, flat lists to tuples.

    Always to single precision, whatever is reconstructed; a complex array stays complex.
    """
    if key == "rng" and isinstance(value, int):
        return torch.Generator().manual_seed(value)
    if isinstance(value, str) and value.endswith(".npy"):
        value = np.load(value)
    if isinstance(value, (list, tuple)):
        if not value or not isinstance(value[0], (list, tuple)):
            return tuple(value)
        value = np.array(value)
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value.astype(np.complex64 if np.iscomplexobj(value) else np.float32))
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape)) if key == "filter" else tensor


def _tensor(pixels: Array, shape: Shape) -> torch.Tensor:
    """Copy pixels to a tensor of the working dtype."""
    return torch.from_numpy(np.array(pixels, working_dtype(pixels.dtype), order="C")).reshape(shape)
