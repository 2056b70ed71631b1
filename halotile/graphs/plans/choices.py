"""The inputs and the objects that a job chooses by name: checked, and made with their options."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputError, MemoryRefused
from halotile.graphs.kinds.sections import DenoiserChoice, Job, NamedChoice, Run, parse_bytes
from halotile.graphs.rules.keys import WrittenAs, by_channel, keys_of, stand_ins, written_keys
from halotile.graphs.words import bytes_text, counted, shown
from halotile.storage.arrays import Source, open_array, planes_last
from halotile.storage.disk import place
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.grid import Region
from halotile.storage.images.planes import channel_number
from halotile.storage.run_directory.object_claim import check_finished
from halotile.storage.sharded.local_reader import lost_by_name
from halotile.storage.stored_array import StoredArray, read_error
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.options import import_from, option_fields
from halotile.tasks.user_code import qualified_name


def with_selected(source: Source, channels: Sequence[str | int]) -> Source:
    """Return an image with the channels that ``input.channels`` selects; all where it names none."""
    numbers = [channel_number(source, channel, "input.channels") for channel in channels]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"input.channels is {shown(channels)}, which has a channel twice. Write each once.")
    return source.with_channels(numbers) if numbers else source


def check_paths(path: str, output: OutputPath, key: str = "output.path") -> None:
    """Refuse an output that is an input, is inside it, or contains it."""
    check_whole(path)
    place.check_apart(path_of(path), output, key)


def check_whole(path: str) -> None:
    """Refuse an input that a run has begun to write and not finished, or that has lost a shard since: some pixels are missing."""
    outputs = (path_of(path), path_of(path).parent)  # the input may be a level of an OME-Zarr group
    digests = [check_finished(output) for output in outputs if output.name]
    if any(digests) or not isinstance(image := path_of(path), Path):
        return
    try:
        lost = lost_by_name(image)
    except Exception as error:  # of a damaged zip, among others
        raise read_error(f"{path}: it cannot be read", error) from error
    if lost:
        raise DamagedData(f"{lost}. Otherwise restore the file from a copy.")


def kept_bytes(sources: Iterable[Source | StoredArray], most: int | None = None) -> int:
    """Return the memory of the decoded chunks that a worker keeps between its blocks: of so many sources at most, the largest ones."""
    sizes = (math.prod(s.chunks) * s.dtype.itemsize for s in sources if s.keeps_chunk)
    return sum(sorted(sizes, reverse=True)[:most])


def check_decoding(sources: Iterable[Source], run: Run) -> None:
    """Refuse inputs whose single chunk takes more memory than a worker has, before any is decoded."""
    for source in sources:
        chunk = 1 if source.mapped else math.prod(source.chunks) * source.dtype.itemsize
        # It is in memory both encoded and decoded, or in two forms.
        if 2 * chunk > parse_bytes(run.memory_per_worker):
            raise MemoryRefused(
                f"run.memory_per_worker is {run.memory_per_worker}; {source.path} is stored in chunks of "
                f"{' × '.join(map(str, source.chunks))} pixels, {bytes_text(chunk)} each, and one can only be decoded whole, which takes "
                f"{bytes_text(2 * chunk)} beside the program. Write a larger run.memory_per_worker, or convert the image to a Zarr or a TIFF in small chunks first. "
                "If the file is far smaller than that, it may be damaged: restore it from its origin."
            )


def computed_by(denoiser: Denoiser, device: str, precision: str) -> tuple[str, str, tuple[str, ...]]:
    """Return device and precision of a denoiser, with notes where these differ from what was asked for."""
    notes = []
    if device != "cpu" and isinstance(denoiser, ArrayDenoiser):
        device = "cpu"
        notes.append(f"{denoiser.title} is a function of arrays and computes on CPUs")
    if precision != "float32" and not denoiser.convolutional:
        notes.append(f"run.precision is {precision}, which is for networks: {denoiser.title} computes in float32")
        precision = "float32"
    elif precision == "tf32" and device == "cpu":
        notes.append("run.precision is tf32, which is a format of GPUs: CPUs compute in float32")
        precision = "float32"
    return device, precision, tuple(notes)


def describe_denoiser(denoiser: Denoiser) -> dict[str, Any]:
    """Return a denoiser as JSON: its name and every option. A function is represented by its name."""
    options = {key: getattr(denoiser, field.name) for key, field in option_fields(type(denoiser)).items()}
    return {"name": denoiser.name} | {key: _as_json(value) for key, value in options.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, partial):
        return {"call": _as_json(value.func), "args": _as_json(value.args), "kwargs": _as_json(value.keywords)}
    if callable(value):
        return qualified_name(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def make_chosen(choice: NamedChoice, job: Job | None = None) -> Any:
    """Return the object that a choice names, with its options checked; a script, without a job, may import."""
    name, options = choice.name, choice.options
    what = f"{choice.word()} {name}"
    declared = choice.declared(name)
    fields = option_fields(declared)
    if unknown := sorted(set(options) - set(fields)):
        advice = f"Write some of {', '.join(sorted(fields))}." if fields else "It has none."
        raise ConfigError(f"{what} has no option {unknown[0]!r}. {advice}")
    if job is not None and "import" in fields:
        allow_imports(what, options, job)
    keys = keys_of(declared)
    if left_out := [key for key in keys if keys[key].is_required and key not in options]:
        texts = {key: keys[key].field.metadata.get("description") for key in left_out}
        hints = "".join(f" {key} is {text}." for key, text in texts.items() if text)
        raise ConfigError(f"{what}: write {' and '.join(left_out)}, which has no default.{hints}")
    kinds = stand_ins(declared)
    try:
        return declared(
            **{fields[key].name: _value(value, kinds.get(key), choice, job) for key, value in options.items()}
        )
    except TypeError as error:
        raise ConfigError(f"{what}: {error}. `recon-cli schema` lists its options.") from None


def choices_of_channels(given: Any, others: Mapping[str, DenoiserChoice], source: Source) -> list[Any]:
    """Return the choice for each channel, from a denoiser with options by channel, and other ones; a single one where nothing differs."""
    options = given.options if isinstance(given, DenoiserChoice) else {}
    apart = by_channel(options, written_keys(given.declared(given.name))) if options else {}
    if not apart and not others:
        return [given]
    count = source.shape[source.axes.index("c")] if "c" in source.axes else 1
    for key, value in apart.items():
        if isinstance(value, Mapping):
            apart[key] = _numbered(value, source, f"denoiser.{key}")
        elif len(value) == count:
            apart[key] = dict(enumerate(value))
        else:
            raise ConfigError(
                f"denoiser.{key} is {shown(value)}, and the image has {counted(count, 'channel')}. Write a value for each."
            )
    chosen = [given] * count
    for number in range(count if apart else 0):
        known = {key: value for key, value in options.items() if number in apart.get(key, [number])}
        own = {key: apart[key][number] if key in apart else value for key, value in known.items()}
        chosen[number] = replace(given, options=own)
    for number, other in _numbered(others, source, "channels").items():
        chosen[number] = other
    return chosen


def _numbered(values: Mapping[Any, Any], source: Source, key: str) -> dict[int, Any]:
    """Return values by the numbers of the channels that their keys name."""
    found = {channel_number(source, channel, key): value for channel, value in values.items()}
    if len(found) < len(values):
        raise ConfigError(f"{key} names a channel twice, in {', '.join(map(str, values))}. Write each once.")
    return found


def make_part(section: str, choice: NamedChoice, job: Job) -> Any:
    """Return the object that a section names; its errors name the section."""
    try:
        return make_chosen(choice, job)
    except (ConfigError, InputError) as error:
        text = str(error)
        raise type(error)(text if text.startswith(section) else f"{section}: {text}") from None


def describe_options(chosen: Any) -> dict[str, Any]:
    """Return the options of a chosen object that a job file has as they are, by their keys."""
    options, kinds = option_fields(type(chosen)), stand_ins(type(chosen))
    return {key: getattr(chosen, field.name) for key, field in options.items() if key not in kinds}


def _value(value: Any, kind: WrittenAs | None, choice: NamedChoice, job: Job | None) -> Any:
    """Return a value of a job as the object takes it; a script may pass it in that form already."""
    if kind == "operators":
        return tuple(_nested(inner, type(choice), job) for inner in value)
    if kind == "denoiser":
        return _nested(value, DenoiserChoice, job)
    if kind is not None and isinstance(value, str):
        source = open_array(value)
        check_whole(value)
        return (
            planes_last(cast(Source, source)) if kind == "image" else np.array(source.read(Region.whole(source.shape)))
        )
    if kind == "array" and isinstance(value, list | tuple):
        return np.asarray(value)
    # A file has lists where the options are tuples.
    return tuple(value) if isinstance(value, list) else value


def _nested(value: Any, choice: type[NamedChoice], job: Job | None) -> Any:
    """Return an object among the options of another: a name and its options."""
    if isinstance(value, NamedChoice):
        return make_chosen(value, job)
    if not isinstance(value, Mapping):
        return value
    if not isinstance(value.get("name"), str):
        raise ConfigError(f"{choice.word()} has no name. Write {{name: ...}} with its options.")
    return make_chosen(choice.nested(value), job)


def allow_imports(what: str, options: Mapping[str, Any], job: Job) -> None:
    """Make the user's own code beside the job file importable, or refuse to run it."""
    if not job.allow_import:
        raise ConfigError(
            f"{what} runs code of your own ({options.get('import')}). If you trust this job file, add --allow-import."
        )
    import_from(job.import_folder)
