"""The public name of :mod:`halotile.tasks.groups.collectives`."""

from halotile.tasks.groups.collectives import *  # noqa: F403 - one module under two names
from halotile.tasks.groups.collectives import __all__, __doc__  # noqa: A004, F401
