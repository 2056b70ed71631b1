"""The public name of :mod:`halotile.tasks.groups.torch_group`."""

from halotile.tasks.groups.torch_group import *  # noqa: F403 - one module under two names
from halotile.tasks.groups.torch_group import __all__, __doc__  # noqa: A004, F401
