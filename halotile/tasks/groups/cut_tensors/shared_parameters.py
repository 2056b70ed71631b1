"""Parameters that all ranks have a copy of: their gradients are summed over the ranks, in one message of each dtype, at the end of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from halotile.errors import ConfigError, PeerLost
from halotile.tasks.groups.cut_tensors.transfers import wide_type
from halotile.tasks.groups.group import TorchGroup

UNREACHED = (
    "Perhaps its backward pass reached none of the parameters that mark_shared marks, so that it sends no gradients: add 0 * parameter.sum() of one of "
    "them to its loss."
)
MARKED = WeakIdKeyDictionary()
"""Parameters whose gradients are summed."""


def mark_shared(module: torch.nn.Module, group: TorchGroup, *, mean: bool = False) -> Callable[[], None]:
    """Sum the gradients of a module's parameters over the ranks whenever a backward pass ends; returns a function that ends this.

    All gradients travel in one buffer, in float32 whatever they are (float64 and complex ones in buffers of their own). A parameter without a gradient on
    some ranks counts as zero there. Every rank must run the backward pass, and at least one of the parameters must have a gradient in it: a pass
    that reaches none of them sends nothing, and the other ranks wait in vain, or take the gradients of its next pass for those of this one.

    Parameters
    ----------
    module : Module
        The module, with the same parameters on all ranks.
    group : TorchGroup
        The ranks.
    mean : bool
        The mean over the ranks instead of the sum.

    Raises
    ------
    ConfigError
        When a parameter is marked already.
    PeerLost
        In a backward pass, when another rank ended, or its pass reaches none of the parameters.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1)
    >>> unmark = mark_shared(layer, TorchGroup())
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.grad.tolist()
    [[1.0, 1.0]]
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter in MARKED for parameter in parameters):
        raise ConfigError(
            "a parameter of this module is marked already: its gradients would be summed twice. "
            "Call first what the other mark_shared returned."
        )
    MARKED.update(dict.fromkeys(parameters, True))
    arriving: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    passes = [-1]

    def record(number: int, gradient: torch.Tensor) -> None:
        before = parameters[number].grad
        arriving[number] = gradient.detach(), None if before is None else before.clone()

    def written(number: int, _: torch.Tensor) -> None:
        # A pass that failed leaves its gradients behind, and calls nothing at its end.
        if (now := torch._C._current_graph_task_id()) != passes[0]:
            passes[0] = now
            found.clear()
            torch.autograd.Variable._execution_engine.queue_callback(reduce)
        found[number] = arriving.pop(number)

    def reduce() -> None:
        _sum_gradients(parameters, dict(found), group, mean)
        found.clear()

    handles = []
    for number, parameter in enumerate(parameters if group.world_size > 1 else ()):
        handles.append(parameter.register_hook(partial(record, number)))
        handles.append(parameter.register_post_accumulate_grad_hook(partial(written, number)))

    def unmark() -> None:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            MARKED.pop(parameter, None)

    return unmark


@torch.no_grad()  # type: ignore[untyped-decorator]
def _sum_gradients(
    parameters: list[torch.nn.Parameter],
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]],
    group: TorchGroup,
    mean: bool,
) -> None:
    """Replace the gradients of this rank, each found with what was there before, by the sums over the ranks."""
    added = [found[n][0] if n in found else torch.zeros_like(p) for n, p in enumerate(parameters)]
    wide = [gradient.to(wide_type(gradient)) for gradient in added]
    for dtype in sorted({gradient.dtype for gradient in wide}, key=str):
        chosen = [number for number, gradient in enumerate(wide) if gradient.dtype == dtype]
        flat = torch.cat([wide[number].reshape(-1) for number in chosen])
        try:
            total = group.all_reduce(flat, "mean" if mean else "sum")
        except PeerLost as error:
            raise PeerLost(f"{error} {UNREACHED}") from error
        for number, part in zip(chosen, total.split([wide[n].numel() for n in chosen]), strict=True):
            parameter = parameters[number]
            before = found[number][1] if number in found else parameter.grad
            gradient = part.view(parameter.shape).to(parameter.dtype)
            parameter.grad = gradient if before is None else before + gradient
