"""Keys of a part of a job: their types as a job file has them, and what is wrong with the values of a file or a script."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from halotile.errors import ConfigError, HalotileError
from halotile.graphs import words
from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.sections import NamedChoice
from halotile.storage.rim import Readable
from halotile.storage.views import Constant
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.median import Median
from halotile.tasks.operators.base import Operator
from halotile.tasks.operators.shift import Shift
from halotile.tasks.options import OwnPath, ReadPath, option_fields

PlacedFaults = dict[words.KeyPath, str]  # messages by place
WrittenAs = Literal["array", "image", "operators", "denoiser"]

# Types in a job file, and values that a class is tried with: the content of a file is not known yet.
_WRITTEN: Mapping[WrittenAs, tuple[Any, Callable[[Any], Any]]] = {
    "array": (ReadPath, lambda _: np.ones((1, 1))),
    "image": (ReadPath, lambda _: Constant((1, 1), np.dtype("float32"))),
    "operators": (tuple[Mapping[str, Any], ...], lambda value: tuple(Shift(shift=(0, 0)) for _ in value)),
    "denoiser": (Mapping[str, Any], lambda _: Median(size=3)),
}
_STAND_INS: Mapping[Any, Any] = {
    int: 3, float: 1.0, str: "module:name", bool: False, ReadPath: "file", OwnPath: "file"
}  # fmt: skip
"""Values that pass every check, for a required option that is wrong itself while the others are checked."""
_YES, _NO = ("yes", "on", "y", "true"), ("no", "off", "n", "false")  # booleans of YAML 1.1


class Key(NamedTuple):
    """A key: its type as a job file has it, and its field in the class."""

    type: Any
    field: Field[Any]

    @property
    def is_required(self) -> bool:
        """True for a key without a default."""
        return self.field.default is MISSING and self.field.default_factory is MISSING


Keys = Mapping[str, Key]


_hints_of: Callable[[type], dict[str, Any]] = functools.cache(functools.partial(get_type_hints, include_extras=True))


def keys_of(kind: type) -> Keys:
    """Return the keys of a dataclass."""
    hints = _hints_of(kind)
    return {key: Key(hints[field.name], field) for key, field in option_fields(kind).items()}


def written_keys(declared: type, choice: type[NamedChoice] | None = None) -> Keys:
    """Return the keys beside a name in a job file: those of every name of a choice, then the options of the named class.

    >>> from halotile.graphs.jobs.reconstruct.job import OperatorChoice
    >>> from halotile.tasks.operators.blur import Blur
    >>> list(written_keys(Blur, OperatorChoice))
    ['data', 'noise_sigma', 'kernel', 'boundary', 'factor', 'engine']
    >>> words.expected(written_keys(Blur)["kernel"].type)
    'a path'
    """
    kinds = stand_ins(declared)
    own = {key: kind for key, kind in keys_of(choice).items() if key not in ("name", "options")} if choice else {}
    return own | {key: Key(_type_of(kind.type, kinds.get(key)), kind.field) for key, kind in keys_of(declared).items()}


def _type_of(hint: Any, kind: WrittenAs | None) -> Any:
    """Return the type of a value in a job file: a path for an array, a name for a Python object."""
    if kind is not None:
        return _WRITTEN[kind][0] | None if type(None) in words.parts(hint) else _WRITTEN[kind][0]
    return str if {str, Any} == set(words.parts(hint)) else hint


def stand_ins(declared: type) -> dict[str, WrittenAs]:
    """Return the options that a job writes differently: an array or an image by its path, other objects by their mappings.

    >>> from halotile.tasks.operators.blur import Blur
    >>> from halotile.tasks.operators.composition import Composition
    >>> stand_ins(Blur), stand_ins(Composition)
    ({'kernel': 'array'}, {'operators': 'operators'})
    """
    kinds = {key: _kind_of(kind.type) for key, kind in keys_of(declared).items()}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _kind_of(hint: Any) -> WrittenAs | None:
    for part in words.parts(hint):
        if get_origin(part) is np.ndarray:
            return "array"
        if part is Readable:
            return "image"
        if part is Denoiser:
            return "denoiser"
        if get_origin(part) is tuple and get_args(part)[0] is Operator:
            return "operators"
    return None


def by_channel(options: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return the options that have a list or mapping of values, one for each channel, in place of a value.

    >>> from halotile.tasks.denoisers.tv import TotalVariation
    >>> by_channel({"strength": {"DAPI": 1.0}, "iterations": 20, "spacing": [1, 1]}, written_keys(TotalVariation))
    {'strength': {'DAPI': 1.0}}
    """
    return {
        key: value
        for key, value in options.items()
        if key in keys and isinstance(value, Mapping | list | tuple) and value and not words.fits(value, keys[key].type)
    }


def fault_of_option(choice: type[NamedChoice], name: str, option: str) -> str | None:
    """Return the fault of an option that belongs to other names than the written one, if it does.

    >>> from halotile.graphs.jobs.reconstruct.job import FidelityChoice
    >>> fault_of_option(FidelityChoice, "l2", "background")
    'is for fidelity poisson, and the name is l2; write poisson, or leave it out'
    """
    others = []
    for other in choice.accepted():
        with suppress(HalotileError, AttributeError):
            others += [other] if option in option_fields(choice.declared(other)) else []
    if not others:
        return None
    *first, last = others
    names = f"{', '.join(first)} or {last}" if first else last
    instead = "one of these names" if first else last
    return f"is for {choice.word()} {names}, and the name is {name}; write {instead}, or leave it out"


def unknown(key: str, keys: Iterable[str]) -> str:
    """Return the message for an unknown key.

    >>> unknown("siez", ["size", "depth"]), unknown("colour", ["size", "depth"])
    ('unknown key; did you mean size?', 'unknown key; write one of size, depth')
    """
    if near := words.nearest(key, keys):
        return f"unknown key; did you mean {near}?"
    known = ", ".join(keys)
    return f"unknown key; write one of {known}" if known else "unknown key; there are no options"


def faults_in(
    keys: Keys,  # keys, values: keys that there are, and the values
    values: Mapping[str, Any],
    # checks of values of the right type, by key. Empty values are not checked
    checks: Mapping[str, Check] | None = None,
    # returns a better message for an unknown key, such as one that another section has
    elsewhere: Callable[[str], str | None] = lambda _: None,
    *,
    in_file: bool = True,  # file may have a key without a value; a script gives None itself
) -> PlacedFaults:
    """Return the faults of a part of a job: unknown and missing keys, types, and what the checks of values find.

    Nothing is converted: the text "2" is not a number, and a number is not text.

    >>> from halotile.graphs.kinds.sections import Tile
    >>> faults_in(keys_of(Tile), {"siez": 3, "batch": "4", "depth": [1, "x"]})[("batch",)]
    '"4" is not auto or a whole number; write it without quotes'
    """
    faults: PlacedFaults = {}
    for key, value in values.items():
        if key not in keys:
            faults[key,] = elsewhere(key) or unknown(key, keys)
            continue
        wrong = {(key, *place): message for place, message in _type_faults(value, keys[key].type)}
        if wrong and value is None and in_file:
            instead = "" if keys[key].is_required else ", or leave the key out for its default"
            wrong = {(key,): f"is empty; write {words.expected(keys[key].type)}{instead}"}
        check = (checks or {}).get(key)
        if not wrong and value is not None and check and (message := check(value)):
            wrong = {(key,): message}
        faults |= wrong
    misspelt = {words.nearest(key, keys) for key in values if key not in keys}  # one fault, not two
    for key, kind in keys.items():
        if kind.is_required and key not in values and key not in misspelt:
            faults[key,] = f"missing; write {kind.field.metadata.get('description') or words.expected(kind.type)}"
    return faults


def raise_faults(faults: PlacedFaults) -> None:
    """Raise one error that lists every fault; do nothing when there is none."""
    lines = [f"{words.dotted(place)}: {message}" for place, message in faults.items()]
    if len(lines) > 1:
        lines.insert(0, f"{len(lines)} problems in the job; nothing was started")
    if lines:
        raise ConfigError("\n".join(lines))


def _type_faults(value: Any, annotation: Any) -> Iterator[tuple[words.KeyPath, str]]:
    """Yield the faults of a value that is not of a type: those of the entries of a list or mapping, where it is one."""
    if words.fits(value, annotation):
        return
    entries = list(_entries(value, annotation))
    for key, entry, kind in entries:
        yield from (((key, *place), message) for place, message in _type_faults(entry, kind))
    if not entries:
        yield (), f"{words.shown(value)} is not {words.expected(annotation)}{_advice(value, annotation)}"


def _entries(value: Any, annotation: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Yield place, value and type of each entry, where the only type allowed is a list or mapping that the value is."""
    allowed = [part for part in words.parts(annotation) if part is not type(None)]
    kinds = words.entry_types(allowed[0], len(value)) if isinstance(value, list | tuple) else None
    if len(allowed) == 1 and kinds is not None and len(kinds) == len(value):
        yield from zip(range(len(value)), value, kinds, strict=True)
    elif len(allowed) == 1 and isinstance(value, Mapping) and (kind := words.value_type(allowed[0])) is not None:
        yield from ((key, entry, kind) for key, entry in value.items())


def _advice(value: Any, annotation: Any) -> str:
    """Return a hint at the value that was probably meant."""
    allowed = {*words.parts(annotation)}
    if isinstance(value, str):
        if bool in allowed and value.lower() in _YES + _NO:
            return f"; in YAML 1.2 that is text: write {'true' if value.lower() in _YES else 'false'}"
        if value in ("x", "y") and Mapping[str, str | bool] in allowed:
            return f"; write {{axis: {value}}}"
        if {int, float} & allowed:
            with suppress(ValueError):
                return "; write it without quotes" if math.isfinite(float(value)) else ""
        # Words of a fixed list are short: the threshold of similarity is lower than for keys.
        near = words.nearest(value, words.choices(annotation), likeness=0.5)
        return f"; did you mean {near}?" if near else ""
    if isinstance(value, float) and int in allowed and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, int | float) and {str, ReadPath, OwnPath} & allowed:
        return "; put it in quotes if it is meant as text"
    return ""


def build(kind: type, keys: Keys, values: Mapping[str, Any], faults: PlacedFaults) -> tuple[Any, PlacedFaults]:
    """Return an instance of a class, or None and all faults: those that are known, and those that the class finds.

    A class stops at the first option that it refuses. So that option is taken out, and the class is tried with the rest,
    until none is refused. No file is opened: see ``stand_ins``.

    >>> from halotile.tasks.operators.blur import Blur
    >>> build(Blur, written_keys(Blur), {"kernel": "k.npy", "boundary": "round"}, {})
    (None, {('boundary',): "boundary is 'round': write one of circular, reflect, replicate, zero, valid"})
    """
    faults, kinds, fields = dict(faults), stand_ins(kind), option_fields(kind)
    wrong = {place[0] for place in faults}
    while True:
        rest = {key: taken(values[key], keys[key].type) for key in fields if key in values and key not in wrong}
        for key in (key for key in fields if keys[key].is_required and key not in rest):
            rest[key] = next((_STAND_INS[part] for part in words.parts(keys[key].type) if part in _STAND_INS), None)
            if rest[key] is None:
                return None, faults
        try:
            for key in kinds.keys() & {key for key, value in rest.items() if value is not None}:
                rest[key] = _WRITTEN[kinds[key]][1](rest[key])
            built = kind(**{fields[key].name: value for key, value in rest.items()})
            return (None if faults else built), faults
        except ValueError as error:
            message = str(error).rstrip(".")
        named = next((word for word in re.findall(r"\w+", message) if word in keys), None)
        if named in wrong:
            return None, faults
        faults[(named,) if named else ()] = message
        if named is None:
            return None, faults
        wrong.add(named)


def taken(value: Any, annotation: Any) -> Any:
    """Return a value of a job file as a class has it: a tuple for a list, and a float where whole numbers are not meant.

    >>> taken([0, 1], tuple[float, float]), taken(3, int | Literal["auto"])
    ((0.0, 1.0), 3)
    """
    allowed = words.parts(annotation)
    for part in allowed:
        if isinstance(value, list) and (kinds := words.entry_types(part, len(value))) is not None:
            return tuple(map(taken, value, kinds))
        if isinstance(value, dict) and (kind := words.value_type(part)) is not None:
            return {key: taken(entry, kind) for key, entry in value.items()}
    return float(value) if type(value) is int and float in allowed and int not in allowed else value
