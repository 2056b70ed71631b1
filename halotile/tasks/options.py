"""Keys of a denoiser's options in a job file, and checks that several denoisers share."""

import dataclasses
import importlib
import math
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeGuard

from halotile.errors import ConfigError

Auto = Literal["auto"]
ReadPath = Annotated[str, "read"]  # path of a file that is read: it has to exist when a job is checked
OwnPath = Annotated[str, "own"]  # path that need not exist when a job is checked


def job_key(field: str) -> str:
    """The key that stands for a dataclass field in a job file: the field without a trailing underscore.

    The underscore marks a key that is a Python keyword or the name of a method.

    >>> job_key("import_"), job_key("strength")
    ('import', 'strength')
    """
    return field.rstrip("_")


NO_OPTION = {"option": False}  # metadata of a field that no job writes


def option_fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that are options of a job, by their keys.

    >>> from halotile.tasks.denoisers.gaussian import Gaussian
    >>> list(option_fields(Gaussian))
    ['spacing', 'sigma', 'truncate']
    """
    return {job_key(f.name): f for f in dataclasses.fields(kind) if f.init and f.metadata.get("option", True)}


def with_description(text: str) -> dict[str, str]:
    """Metadata of a field that describes what to write, where the type alone does not."""
    return {"description": text}


def check_above_zero(key: str, value: object, example: float = 0.1) -> None:
    """Refuse anything but a finite number greater than zero."""
    if not _is_number(value) or not value > 0:
        raise ConfigError(f"{key} is {value!r}: it must be a number above 0. Write for example {key}: {example:g}")


def check_whole(key: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r}: write a whole number of at least {least}.")


def check_odd(key: str, value: object) -> None:
    """Refuse anything but an odd whole number above zero: a window needs a centre pixel."""
    check_whole(key, value, 1)
    if isinstance(value, int) and value % 2 == 0:
        raise ConfigError(
            f"{key} is {value}: a window with an even edge has no centre pixel. Write {value - 1} or {value + 1}."
        )


def check_sizes(key: str, values: Sequence[object]) -> None:
    """Refuse a list unless it holds numbers above zero."""
    if not values or not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
        raise ConfigError(f"{key} is {list(values)!r}: write a number above 0 for each tiled axis.")


def check_weights(weights: object, sha256: object) -> None:
    """Refuse weights at a URL, and a malformed checksum. Opens no file."""
    if isinstance(weights, str) and "://" in weights:
        raise ConfigError(
            f"weights is {weights!r}: weights are read from local files. Download it, and write the path of the file."
        )
    if sha256 is None:
        return
    if weights is None:
        raise ConfigError("sha256 is given without weights. Write weights: FILE, or omit sha256.")
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", sha256.strip()):
        raise ConfigError(
            f"sha256 is {sha256!r}: it must have 64 hexadecimal digits. Write what `sha256sum FILE` prints, or omit it."
        )


def check_word(key: str, value: object, words: tuple[str, ...]) -> None:
    """Refuse anything but one of the words."""
    if value not in words:
        raise ConfigError(f"{key} is {value!r}: write one of {', '.join(words)}.")


def check_channels(channels: object, same: bool = False) -> None:
    """Refuse anything but a pair of channel counts; ``same``: the two must be equal."""
    pair = tuple(channels) if isinstance(channels, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ConfigError(
            f"channels is {channels!r}: write the numbers of channels in and out, such as [1, 1] or [3, 3]."
        )
    if same and pair[0] != pair[1]:
        raise ConfigError(
            f"channels is {list(pair)}: this denoiser returns as many channels as it takes. Write [{pair[0]}, {pair[0]}]."
        )


def check_level(sigma: object) -> None:
    """Refuse a noise level that is neither None, nor ``auto``, nor a number above zero."""
    if sigma is None or sigma == "auto":
        return
    if not _is_number(sigma) or not sigma > 0:
        raise ConfigError(
            f"sigma is {sigma!r}: a noise level must be above 0. "
            "Write a number, or auto to have it estimated, or omit it."
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
    """Put a folder first in the import path: that of the job file and a user's own code."""
    if folder is not None and sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


def import_reference(reference: str) -> Any:
    """Import the object that ``package.module:name`` names. Runs the code of that module.

    >>> import_reference("math:floor")(2.5)
    2
    """
    check_reference(reference)
    module, _, path = reference.partition(":")
    try:
        imported: Any = importlib.import_module(module)
        for name in path.split("."):
            imported = getattr(imported, name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"import is {reference!r}, but there is no module {error.name!r}. "
            "Put its file beside the job file, install its package in this environment, or correct the name."
        ) from error
    except AttributeError as error:
        raise ConfigError(f"import is {reference!r}, but {error}. Write a name that the module defines.") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"import is {reference!r}, but importing it failed: {type(error).__name__}: {error}. "
            f'Try python -c "import {module}" first.'
        ) from error
    if not callable(imported):
        raise ConfigError(
            f"import is {reference!r}, which is a {type(imported).__name__}. Write the name of a function."
        )
    return imported


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
