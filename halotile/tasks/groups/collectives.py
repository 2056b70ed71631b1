"""Collectives of torch programs: differentiable, of any sizes, for a tensor that is cut along one axis among ranks.

Each is the exchange of some slices, so that its gradient is the adjoint: what was copied is summed, and what was summed is copied. The whole
tensor is the concatenation of the ranks' parts; ``sizes`` are their lengths along the axis ``dim``, and a part may be empty. All ranks must call
a function, and use its result in their loss.

Examples
--------
>>> import torch
>>> from halotile import collectives, torch_group
>>> with torch_group.join() as group:
...     whole = collectives.all_gather_v(torch.arange(3.0), group, [3])
>>> whole.tolist()
[0.0, 1.0, 2.0]
"""

from halotile.tasks.groups.cut_tensors import fft
from halotile.tasks.groups.cut_tensors.transfers import (
    all_gather_v,
    all_reduce,
    all_reduce_v,
    all_to_all_v,
    copy_v,
    distributed_transpose,
    even_sizes,
    gather_v,
    halo_exchange,
    indexed_all_to_all_v,
    mark_shared,
    reduce_loss,
    scatter_v,
)

__all__ = [
    "all_gather_v", "all_reduce", "all_reduce_v", "all_to_all_v", "copy_v", "distributed_transpose",
    "even_sizes", "fft", "gather_v", "halo_exchange", "indexed_all_to_all_v", "mark_shared", "reduce_loss",
    "scatter_v",
]  # fmt: skip
