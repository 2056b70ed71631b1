"""Sections of a job file as function arguments: a mapping with the same keys, or only the value of the main key."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import AUTO
from halotile.graphs.clusters.common.cluster_kind import check_one_script, cluster_kind_of
from halotile.graphs.clusters.common.security import host_of, is_loopback
from halotile.graphs.kinds.sections import Cluster, NamedChoice
from halotile.graphs.rules.keys import fault_of_option, faults_in, keys_of, raise_faults, unknown, written_keys
from halotile.graphs.rules.values import OF_CLUSTERS, apply_rules
from halotile.graphs.words import shown

if TYPE_CHECKING:
    from distributed import Client


def whole_path(argument: str, place: Any) -> str:
    """Return a path as text: ``~`` expanded, relative paths resolved against the starting folder of the script.

    Addresses such as ``s3://`` stay as they are.

    ``argument``: name of the argument in the script; ``place``: path.

    >>> whole_path("data", "/scans/y.zarr"), whole_path("data", "s3://scans/y.zarr")
    ('/scans/y.zarr', 's3://scans/y.zarr')
    """
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(
            f"{argument} is of type {type(place).__name__}, and the work goes from disk to disk. "
            "Write the array to a Zarr or .npy, and give its path."
        )
    text = os.path.expanduser(os.fspath(place))
    return text if "://" in text or not text else str(Path.cwd() / text)


T = TypeVar("T")
Words = Mapping[str, Any]  # a section of a job with the keys of a job file


def section(name: str, kind: type[T], written: str | Words, first: str = "name") -> T:
    """Build a section from its keys and values; a single word is the value of its ``first`` key.

    >>> section("cluster", Cluster, {"kind": "slurm", "queu": "fast"}, "kind")
    Traceback (most recent call last):
    halotile.errors.ConfigError: cluster.queu: unknown key; did you mean queue?
    """
    values = {first: written} if isinstance(written, str) else written
    if not isinstance(values, Mapping):
        raise ConfigError(
            f'{name} is {shown(written)}: that is neither a {first} nor a mapping. Write {{"{first}": ...}}.'
        )
    # A job is a value: its lists become tuples, whether they were given as lists or tuples.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    if not issubclass(kind, NamedChoice):
        raise_faults({(name, key): unknown(key, keys_of(kind)) for key in values if key not in keys_of(kind)})
        return kind(**values)
    given = values.get("name", getattr(kind, "name", None))
    if given in kind.accepted():  # the check of the job reports others
        keys = ["name", *written_keys(kind.declared(given), kind)]
        strange = (key for key in values if key not in keys)
        raise_faults({(name, key): fault_of_option(kind, given, key) or unknown(key, keys) for key in strange})
    return kind.from_mapping(values)


def check_options(kind: type, options: Words) -> None:
    """Refuse keyword arguments that are no parameters of a dataclass, or not of their types.

    >>> check_options(Cluster, {"queu": "fast"})
    Traceback (most recent call last):
    halotile.errors.ConfigError: queu: unknown key; did you mean queue?
    >>> check_options(Cluster, {"cores": "two"})
    Traceback (most recent call last):
    halotile.errors.ConfigError: cores: "two" is not a whole number
    """
    raise_faults(faults_in({key.field.name: key for key in keys_of(kind).values()}, options, in_file=False))


def cluster_of_script(written: str | Words | Cluster | Client) -> Cluster:
    """Return the cluster that an argument describes, for a call that starts it, or uses that of an open Client."""
    dask = sys.modules.get("distributed")  # without it no Client is open
    choice = cluster_of(_joining(written) if dask and isinstance(written, dask.Client) else written)
    kind = cluster_kind_of(choice)
    check_one_script(kind)
    if dask and choice.kind == AUTO and not kind.traits.joins and dask.client._get_global_client():
        own = f"this call starts workers of its own ({kind.name}), beside those of the Client that is open"
        warnings.warn(f"{own}. Write cluster=client to use these.", stacklevel=4)
    return choice


def _joining(client: Client) -> Cluster:
    """Return the section of a cluster that a Client is connected to."""
    address = client.scheduler.address if client.status == "running" else client.status
    if client.status != "running" or address.startswith("inproc://"):
        raise ConfigError(
            f"cluster is a Client ({address}) that is closed, or whose workers are threads of this process. Give an open one "
            "with worker processes, or leave cluster out."
        )
    tls = address.startswith("tls://") or not is_loopback(host_of(address))
    return Cluster(kind="scheduler", address=address, tls=tls)


def cluster_of(written: str | Words | Cluster) -> Cluster:
    """Return the cluster that an argument describes.

    >>> cluster_of("slurm").kind, cluster_of({"kind": "slurm", "prologue": ["module load cuda"]}).prologue
    ('slurm', ('module load cuda',))
    """
    choice = written if isinstance(written, Cluster) else section("cluster", Cluster, written, "kind")
    raise_faults(apply_rules(OF_CLUSTERS, {"cluster": choice}))
    return choice
