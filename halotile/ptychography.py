"""The public name of :mod:`halotile.graphs.jobs.ptychography.call`."""

import sys

from halotile.graphs.jobs.ptychography import call
from halotile.graphs.jobs.ptychography.call import *  # noqa: F403 - for tools that read modules without running them

sys.modules[__name__] = call  # one module under both names
