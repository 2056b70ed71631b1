"""The public name of :mod:`halotile.graphs.jobs.ptychography.call`."""

from halotile.graphs.jobs.ptychography.call import *  # noqa: F403 - one module under two names
from halotile.graphs.jobs.ptychography.call import __all__, __doc__  # noqa: A004, F401
