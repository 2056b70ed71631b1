"""The public name of :mod:`halotile.tasks.groups.collectives`."""

import sys

from halotile.tasks.groups import collectives
from halotile.tasks.groups.collectives import *  # noqa: F403 - for tools that read modules without running them

sys.modules[__name__] = collectives  # one module under both names
