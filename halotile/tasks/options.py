"""How the options of a denoiser are written in a job file, and the checks they share."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import sys
from typing import Any, TypeGuard

from halotile.errors import ConfigError


def job_key(field: str) -> str:
    """The key that stands for a dataclass field in a job file: the field without a trailing underscore.

    The underscore is there where the key is a Python keyword or the name of a method.

    Examples
    --------
    >>> job_key("import_"), job_key("strength")
    ('import', 'strength')
    """
    return field.rstrip("_")


def required_keys(kind: type) -> list[str]:
    """The keys of a dataclass that have no default.

    Examples
    --------
    >>> from halotile.tasks.denoisers.tv import TotalVariation
    >>> required_keys(TotalVariation)
    ['strength']
    """
    missing = dataclasses.MISSING
    fields = (field for field in dataclasses.fields(kind) if field.init)
    return [job_key(f.name) for f in fields if f.default is missing and f.default_factory is missing]


def told(what: str) -> dict[str, str]:
    """Metadata of a field of which the type alone does not tell what to write, or where it comes from."""
    return {"told": what}


def description_of(kind: type, key: str) -> str | None:
    """What :func:`told` says of a key of a dataclass, if anything.

    Examples
    --------
    >>> from halotile.tasks.denoisers.dncnn import DnCNN
    >>> what_is_told(DnCNN, "depth")
    """
    return next((f.metadata.get("told") for f in dataclasses.fields(kind) if job_key(f.name) == key), None)


STRICT: dict[str, Any] = {"extra": "forbid", "use_attribute_docstrings": True, "alias_generator": job_key}
"""How a configuration reader must treat the options: unknown keys are errors, docstrings describe."""


def check_above_zero(key: str, value: object) -> None:
    """Refuse anything but a finite number greater than zero."""
    if not _is_number(value) or not value > 0:
        raise ConfigError(
            f"{key} is {value!r}: it has to be a number above 0. Write something like {key}: 0.1"
        )


def check_whole(key: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r}: write a whole number of at least {least}.")


def check_odd(key: str, value: object) -> None:
    """Refuse anything but an odd whole number above zero: a window needs a middle pixel."""
    check_whole(key, value, 1)
    if isinstance(value, int) and value % 2 == 0:
        raise ConfigError(
            f"{key} is {value}: a window with an even edge has no middle pixel. Write {value - 1} or {value + 1}."
        )


def check_weights(weights: object, sha256: object) -> None:
    """Refuse weights that lie on another machine, and a checksum that is none. Opens no file."""
    if isinstance(weights, str) and "://" in weights:
        raise ConfigError(
            f"weights is {weights!r}: weights are read from local files. Fetch it, and write the path of the file."
        )
    if sha256 is None:
        return
    if weights is None:
        raise ConfigError("sha256 is written without weights. Write weights: FILE, or leave sha256 out.")
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", sha256.strip()):
        raise ConfigError(
            f"sha256 is {sha256!r}: it has 64 hexadecimal digits. Write what `sha256sum FILE` prints, or leave it out."
        )


def check_word(key: str, value: object, words: tuple[str, ...]) -> None:
    """Refuse anything but one of the words."""
    if value not in words:
        raise ConfigError(f"{key} is {value!r}: write one of {', '.join(words)}.")


def check_channels(channels: object, same: bool = False) -> None:
    """Refuse anything but a pair of channel counts; ``same``: as many out as in."""
    pair = tuple(channels) if isinstance(channels, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ConfigError(
            f"channels is {channels!r}: write the channels in and out, such as [1, 1] or [3, 3]."
        )
    if same and pair[0] != pair[1]:
        raise ConfigError(
            f"channels is {list(pair)}: as many come out as go in. Write [{pair[0]}, {pair[0]}]."
        )


def check_level(sigma: object) -> None:
    """Refuse a noise level that is neither left out, nor ``auto``, nor a number above zero."""
    if sigma is None or sigma == "auto":
        return
    if not _is_number(sigma) or not sigma > 0:
        raise ConfigError(
            f"sigma is {sigma!r}: a noise level has to be above 0. "
            "Write a number, or auto to have it estimated, or leave it out."
        )


def check_reference(reference: object) -> None:
    """Refuse anything but ``package.module:name``, without importing it."""
    part = r"[^\W\d]\w*"
    if not isinstance(reference, str) or not re.fullmatch(rf"{part}(\.{part})*:{part}(\.{part})*", reference):
        raise ConfigError(
            f"import is {reference!r}: that does not name a Python object. "
            'Write a module, a colon and a name, such as "package.module:build".'
        )


def import_from(folder: str | None) -> None:
    """Let imports start from a folder: that of the job file, where a user's own code lies beside it."""
    if folder is not None and sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


def import_reference(reference: str) -> Any:
    """The object that ``package.module:name`` names. RangeSet the code of that module.

    Raises
    ------
    ConfigError
        When there is no such module, it fails to import, or has no such name.

    Examples
    --------
    >>> import_reference("math:floor")(2.5)
    2
    """
    check_reference(reference)
    module, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"import is {reference!r}, but there is no module {error.name!r}. "
            "Put its file beside the job file, or install its package in this environment, or correct the name."
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"import is {reference!r}, but {error}. Write a name that the module defines."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"import is {reference!r}, but importing it failed: {type(error).__name__}: {error}. "
            f'Try python -c "import {module}" first.'
        ) from error
    if not callable(found):
        raise ConfigError(
            f"import is {reference!r}, which is a {type(found).__name__}. Write the name of a function."
        )
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
