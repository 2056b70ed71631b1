"""The public name of :mod:`halotile.tasks.groups.torch_group`."""

import sys

from halotile.tasks.groups import torch_group
from halotile.tasks.groups.torch_group import *  # noqa: F403 - for tools that read modules without running them

sys.modules[__name__] = torch_group  # one module under both names
