"""The operators of a job with their measurements: opened, checked for probable mistakes, with the shape of the image they share."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputError
from halotile.graphs.jobs.reconstruct.costs import MOST_COMPUTED_TWICE
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.kinds.sections import Job, Run
from halotile.graphs.plans.choices import check_decoding, check_paths, check_whole, make_chosen
from halotile.graphs.plans.notes import note_of_packing
from halotile.graphs.plans.trials.denoiser_trials import bounded
from halotile.graphs.rules.keys import stand_ins
from halotile.graphs.waiting import Report, report_if_slow
from halotile.graphs.words import short_number
from halotile.registry import find
from halotile.storage.arrays import Source, open_array, open_source, planes_last
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.storage.views import Constant, checked, measured
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.image_task import Shared
from halotile.tasks.operators.base import Operator, Shape
from halotile.tasks.operators.composition import Composition, check_adjoint
from halotile.tasks.operators.mask import Mask, Masked
from halotile.tasks.operators.own import Own
from halotile.tasks.terms import CountNoise, Filled, Measurement, Root, Term, Weights


def make_operator(choice: OperatorChoice, job: Job | None = None) -> Operator:
    """Return the operator that a job names, with its options checked; a script, without a job, may import."""
    given = choice.options.get("operator")
    operator: Operator = make_chosen(choice, job) if given is None else given
    return operator


def make_operators(choices: tuple[OperatorChoice, ...], job: Job) -> tuple[Operator, ...]:
    operators = []
    for number, choice in enumerate(choices):
        try:
            operator = make_operator(choice, job)
            for source in sources_in(operator):
                check_whole(source.path)
            operators.append(operator)
        except (ConfigError, InputError) as error:
            raise type(error)(f"operators[{number}]: {error}") from None
    return tuple(operators)


def describe_operator(operator: Operator) -> dict[str, Any]:
    """Return an operator as JSON: its name and every option, arrays and the user's own code by their digests."""
    options = {
        field.name: _as_json(getattr(operator, field.name))
        for field in dataclasses.fields(operator)  # type: ignore[arg-type]  # every operator has to be a dataclass
    }
    code = {"code": operator.code} if isinstance(operator, Own) else {}
    return {"name": operator.name} | options | code


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": digest}
    if hasattr(value, "fingerprint"):
        return value.fingerprint()
    if isinstance(value, tuple | list):
        return [_as_json(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return describe_operator(value)  # type: ignore[arg-type]  # an operator inside another
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def sources_in(value: Any) -> Iterator[Source]:
    """Yield the arrays on disk among the options of an operator."""
    if hasattr(value, "change"):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from sources_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, tuple | list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from sources_in(inner)


def written(choice: OperatorChoice) -> dict[str, Any]:
    """Return a choice as a job file has it; objects that only a script can pass are described."""
    options = {key: _as_json(value) for key, value in choice.options.items()}
    return {"name": choice.name, "data": choice.data, "noise_sigma": choice.noise_sigma} | options


def files_of(choices: Iterable[OperatorChoice]) -> Iterator[Path]:
    """Yield the files that options name."""
    for choice in choices:
        if "operator" not in choice.options:
            meant = stand_ins(find("operators", choice.name).OPERATOR)
            values = (value for key, value in choice.options.items() if meant.get(key) in ("array", "image"))
            yield from (Path(value) for value in values if isinstance(value, str))


def open_measurements(choices: Iterable[OperatorChoice], operators: tuple[Operator, ...]) -> tuple[Source, ...]:
    """Return the measurement of each operator, opened."""
    pairs = zip(choices, operators, strict=True)
    return tuple(_open_measurement(choice.data, operator) for choice, operator in pairs)


def _open_measurement(path: str, operator: Operator) -> Source:
    try:
        return planes_last(open_source(path))
    except DamagedData:
        raise
    except InputError:
        line = open_array(path)
        if len(line.shape) != 1 or line.dtype.kind not in "biuf" or operator.kind != "whole":
            raise
    return cast(Source, line)


class Stack(NamedTuple):
    """The operators and measurements of a job, checked; the shape of their image, and notes on them."""

    operators: tuple[Operator, ...]
    data: tuple[Source, ...]
    shape: Shape
    notes: tuple[str, ...]


def open_stack(
    job: Any, output: OutputPath, images: Sequence[Source], packed: tuple[str, str], report: Report
) -> Stack:
    """Open and check operators and measurements. ``images``: others of the same shape; ``packed``: words for ``note_of_packing``."""
    operators = make_operators(job.operators, job)
    check_made(operators)
    check_masks(operators)
    data = open_measurements(job.operators, operators)
    check_decoding([*data, *images], job.run)
    shape = image_shape(operators, data, job.shape, (image.shape for image in images))
    check_kernels(operators, shape)
    with report_if_slow(report, "comparing adjoints with forwards"):
        notes = [*notes_of(operators), *try_adjoints(operators, shape, job.run)]
    if job.shape == "auto" and all(image.shape != shape for image in images):
        notes += note_of_shape(shape, [source.shape for source in data])
    for source in data:
        notes += (*source.remarks, *note_of_packing(source, *packed))
    for source in (*data, *images):
        check_paths(source.path, output)
    return Stack(operators, data, shape, tuple(dict.fromkeys(notes)))


def image_shape(
    operators: tuple[Operator, ...], data: tuple[Source, ...], given: Any, others: Iterable[Shape] = ()
) -> Shape:
    """Return the shape of the image that all measurements are of.

    ``operators``: stack; ``data``: measurement of each operator; ``given``: shape, where the job has it; ``others``: shapes to try first, before
    those of the measurements.
    """
    if given != "auto":
        if wrong := _shape_fault(operators, data, tuple(given)):
            raise InputError(wrong)
        return tuple(given)
    tried: dict[Shape, str] = {}
    for shape in (*others, *_candidates(operators, data)):
        if (message := _shape_fault(operators, data, shape)) is None:
            return shape
        tried.setdefault(shape, message)
    if not tried:
        raise ConfigError(
            "shape is auto, and data of one axis do not determine the length of the image. Write its shape, such as "
            "shape: [4096, 4096]."
        )
    shape, wrong = next(iter(tried.items()))
    raise ConfigError(
        f"{wrong} If the image is not {' × '.join(map(str, shape))}, write its shape, such as shape: [4096, 4096]."
    )


def check_made(operators: Iterable[Operator]) -> None:
    """Refuse an operator that exists for no shape, such as a physics whose name does not exist."""
    for number, operator in enumerate(operators):
        try:
            _ = operator.kind
        except ConfigError as error:
            raise ConfigError(f"operators[{number}]: {error}") from None


def _candidates(operators: tuple[Operator, ...], data: tuple[Source, ...]) -> Iterable[Shape]:
    for operator, source in zip(operators, data, strict=True):
        if len(source.shape) < 2:
            continue
        factor = getattr(operator, "factor", 1)
        yield (*source.shape[:-2], *(n * factor for n in source.shape[-2:]))


def _shape_fault(operators: tuple[Operator, ...], data: tuple[Source, ...], shape: Shape) -> str | None:
    """Return the fault of this shape of the image, if it has one."""
    for number, (operator, source) in enumerate(zip(operators, data, strict=True)):
        try:
            expected = operator.measured(shape)
        except ConfigError as error:
            return f"operators[{number}]: {error}"
        if expected != source.shape:
            return (
                f"operators[{number}]: {source.path} has shape {list(source.shape)}, but {operator.name} of an image of "
                f"shape {list(shape)} gives {list(expected)}. Write the true shape of the image, or the data of such an image."
            )
    return None


def make_terms(
    levels: Sequence[Source | float],
    operators: tuple[Operator, ...],
    data: tuple[Source, ...],
    fidelity: Fidelity,
    start: Source | None = None,
) -> tuple[Term, ...]:
    """Return the terms of the misfit, each measurement shared by all that read it; counts are checked as they are read."""
    are_counts = fidelity.is_of_counts
    at = None if fidelity.is_square or start is None else Shared(start)
    terms = []
    for number, (level, operator, source) in enumerate(zip(levels, operators, data, strict=True)):
        if isinstance(level, float):
            seen = Shared(checked(source, f"operators[{number}].data", are_counts=are_counts))
            terms.append(Term(operator, seen, 1 / level**2, fidelity, at))
        else:
            part = weighted(number, operator, source, level)
            root = Root(part.weight)
            terms.append(Term(Composition((operator, Mask(mask=root))), Masked(part.data, root), 1.0, fidelity))
    return tuple(terms)


def open_level(number: int, given: float | str, source: Source) -> Source | float:
    """Return the noise level of a measurement, or the map of it, opened."""
    if not isinstance(given, str):
        return float(given)
    sigma = planes_last(open_source(given))
    if sigma.shape != source.shape:
        raise InputError(
            f"operators[{number}].noise_sigma is {given} of shape {list(sigma.shape)}, and the measurement has {list(source.shape)}. Write a map of that shape, "
            "or a number."
        )
    return sigma


def weighted(
    number: int, operator: Operator, source: Source, level: Source | float, background: float | None = None
) -> Measurement:
    """Return a measurement with a weight for each pixel; refuse one of nothing. ``background``: that of counts, whose noise is their own."""
    data = Shared(with_holes(source))
    sigma: Readable = (
        Constant(source.shape, np.dtype(np.float64), level) if isinstance(level, float) else with_holes(level)
    )
    if background is not None:
        sigma = CountNoise(data, max(background, LEAST_RATE), source.path)
    weights = Shared(Weights(data, sigma), computed=True)
    if is_empty(weights):
        given = level if isinstance(level, float) else level.path
        raise InputError(
            f"operators[{number}]: noise_sigma: {given} is above 0 in no pixel where {source.path} has a number, so nothing is measured. "
            "Write another map, or another measurement."
        )
    return Measurement(operator, Filled(data, background or 0.0), weights, number)


LEAST_RATE = 0.02  # least rate that counts are taken to have: about one in the pixels that they are smoothed over


def with_holes(source: Source) -> Readable:
    """Return a measurement with NaN where its file declares that there is none."""
    return measured(source, source.nodata, None, (), len(source.shape))


SUM_TOLERANCE = 0.02  # distance of a kernel's sum from 1 below which the kernel only spreads light
# Pixels of a mask that are checked before a job: if a larger one is 0 so far, the run itself shows the result.
LOOKED_AT = 2**24
TRIED = 2**22  # most pixels for which an operator that sees the whole image is tried before a job
STRIP = 2**20  # pixels that are checked at once


def notes_of(operators: Iterable[Operator]) -> Iterator[str]:
    """Yield notes on kernels that are valid, but probably not what the user meant.

    >>> from halotile.tasks.operators.blur import Blur
    >>> list(notes_of([Blur(kernel=np.ones((3, 3)) / 9), Blur(kernel=np.ones((1, 2)))]))[0][:70]
    'operators[1]: the kernel sums to 2: the image comes out 0.5 times as b'
    """
    for number, operator in enumerate(operators):
        kernel = getattr(operator, "kernel", None)
        if not isinstance(kernel, np.ndarray):
            continue
        total = float(kernel.sum()) / math.prod(kernel.shape[:-2])
        if abs(total - 1) > SUM_TOLERANCE:
            bright = (
                f"the image comes out {1 / total:.3g} times as bright as the measurement. Divide it by its sum if it only spreads light"
                if total > 0
                else "such an operator does not only spread light. Check its sign"
            )
            yield f"operators[{number}]: the kernel sums to {total:.4g}: {bright}."
        if any(edge % 2 == 0 for edge in kernel.shape[-2:]):
            yield (
                f"operators[{number}]: the kernel is {' × '.join(map(str, kernel.shape[-2:]))}: an even edge has no middle "
                "pixel, and the image comes out half a pixel aside. Pad it to an odd edge if that matters."
            )


def note_of_shape(shape: Shape, data: Iterable[Shape]) -> Iterator[str]:
    """Yield a note on an image whose shape was inferred, and that is larger than its measurements.

    >>> list(note_of_shape((120, 140), [(60, 70), (120, 140)]))
    []
    >>> list(note_of_shape((120, 140), [(60, 70)]))[0][:84]
    'shape is auto: the image is taken to be 120 × 140, 4 times the pixels of its largest'
    """
    largest = max(map(math.prod, data))
    if math.prod(shape) > largest:
        yield (
            f"shape is auto: the image is taken to be {' × '.join(map(str, shape))}, {short_number(math.prod(shape) / largest)} times the "
            "pixels of its largest measurement. Write shape, or another factor, if that is not what was meant."
        )


def note_of_passes(per_pass: int, twice: float) -> Iterator[str]:
    """Yield a note where several iterations in a pass compute much of the gradient, this fraction of it, twice.

    >>> list(note_of_passes(2, 0.02))
    []
    >>> list(note_of_passes(20, 3.5))[0][:73]
    'solver.checkpoint_every: 20 computes 350 % of the gradient more than once'
    """
    if per_pass > 1 and twice > MOST_COMPUTED_TWICE:
        yield (
            f"solver.checkpoint_every: {per_pass} computes {100 * twice:.0f} % of the gradient more than once: so many iterations reach "
            "far beyond a block. Write fewer, or a larger output.shard."
        )


def check_kernels(operators: Iterable[Operator], image: Shape) -> None:
    """Refuse a kernel that is larger than its image."""
    for number, operator in enumerate(operators):
        for kernel, planes in _kernels(operator, image):
            if any(taps > n for taps, n in zip(kernel, planes, strict=True)):
                raise ConfigError(
                    f"operators[{number}]: the kernel is {' × '.join(map(str, kernel))} and its image "
                    f"{' × '.join(map(str, planes))}: it would look past both sides at once. Write the shape of the image as it "
                    "is, or crop the kernel to the part that is not 0."
                )


def _kernels(operator: Operator, image: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yield rows and columns of every kernel, and of the image that it is applied to."""
    kernel = getattr(operator, "kernel", None)
    if isinstance(kernel, np.ndarray):
        yield kernel.shape[-2:], image[-2:]
    parts = getattr(operator, "operators", ())
    shapes = operator.shapes(image) if isinstance(operator, Composition) else [image] * len(parts)
    for part, shape in zip(parts, shapes, strict=False):
        yield from _kernels(part, shape)


def check_signs(operators: Iterable[Operator]) -> None:
    """Refuse kernels, and weights of sums, below 0 where an image is multiplied by corrections."""
    for number, operator in enumerate(operators):
        if any(float(np.min(numbers)) < 0 for numbers in _factors(operator)):
            raise ConfigError(
                f"operators[{number}] ({operator.name}) has numbers below 0 in its kernel or its weights, and solver osem multiplies: "
                "it needs operators without negative numbers. Write solver.name: fista; or 0 in their place, if they are only noise."
            )


def _factors(operator: Operator) -> Iterator[Any]:
    """Yield kernel and weights of an operator and of those inside it."""
    found = (getattr(operator, name, None) for name in ("kernel", "weights"))
    yield from (numbers for numbers in found if isinstance(numbers, np.ndarray | tuple) and len(numbers))
    for part in getattr(operator, "operators", ()):
        yield from _factors(part)


def check_masks(operators: Iterable[Operator]) -> None:
    """Refuse a mask that leaves out every pixel, as far as this can be checked quickly."""
    for number, operator in enumerate(operators):
        mask = getattr(operator, "mask", None)
        if mask is not None and is_empty(mask):
            raise ConfigError(
                f"operators[{number}]: the mask is 0 everywhere: nothing of the image would be measured. Write another."
            )


def is_empty(mask: Readable) -> bool:
    """Return True where all of a mask is 0; False for one that is too large to check."""
    length, *other_axes = mask.shape
    if length * math.prod(other_axes) > LOOKED_AT:
        return False
    rows = max(1, STRIP // math.prod(other_axes))
    strips = (
        Region((first, *(0 for _ in other_axes)), (min(first + rows, length), *other_axes))
        for first in range(0, length, rows)
    )
    return not any(np.any(mask.read(strip)) for strip in strips)


def try_adjoints(operators: Iterable[Operator], image: Shape, run: Run) -> tuple[str, ...]:
    """Compare adjoint and forward of foreign operators in a separate process; return notes on those not tried."""
    untried = []
    for number, operator in enumerate(operators):
        if not _is_foreign(operator):
            continue
        if operator.kind == "whole" and math.prod(image) > TRIED:
            untried.append(
                f"operators[{number}] sees the whole image, which is too large to check that its adjoint matches its forward: check it on a smaller image"
            )
            continue
        named = operator.import_ if isinstance(operator, Own) else operator.name
        title = f"operators[{number}] ({named})"
        bounded(partial(_check_adjoint, title, operator, image), title, run)
    return tuple(untried)


def _check_adjoint(title: str, operator: Operator, image: Shape) -> None:
    try:
        check_adjoint(operator, image)
    except ConfigError as error:
        raise ConfigError(f"{title}: {error}") from error


def _is_foreign(operator: Operator) -> bool:
    """Return True where somebody else wrote the operator or a part of it."""
    is_foreign = type(operator).__module__.partition(".")[0] != "halotile"
    return is_foreign or isinstance(operator, Own) or any(map(_is_foreign, getattr(operator, "operators", ())))
