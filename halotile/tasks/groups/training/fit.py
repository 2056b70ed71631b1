"""Training of a network by the ranks of a group, with the same bits for any number of them."""

from __future__ import annotations

import hashlib
import inspect
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from halotile.errors import ConfigError, DamagedData, Diverged
from halotile.storage.disk.durable import DISK, Disk
from halotile.tasks.groups.cut_tensors.transfers import as_real, wide_type
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import count_received

MODES = ("exact", "fast")


def check_arguments(ranks: int, slots: int, seed: int, mode: str) -> None:
    """Refuse numbers and a mode that mean nothing."""
    if slots < ranks:
        raise ConfigError(
            f"slots is {slots}, and there are {ranks} ranks: each takes at least one. Write slots={ranks} or more."
        )
    if seed < 0:
        raise ConfigError(f"seed is {seed}. Write 0 or more.")
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}. Write one of {', '.join(MODES)}.")


def check_stepped_alone(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse an optimizer and a scheduler that want more for a step than that there is one."""
    if not _steps_alone(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that computes the loss anew within a step, and here each step has one loss. "
            "Write another optimizer, such as torch.optim.Adam."
        )
    if scheduler is not None and not _steps_alone(scheduler):
        raise ConfigError(
            f"{type(scheduler).__name__} needs a metric for each step, and none is passed here. "
            "Write a scheduler that follows the number of steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )


def _steps_alone(stepped: Any) -> bool:
    """True where a step needs no arguments."""
    try:
        inspect.signature(type(stepped).step).bind(stepped)
    except TypeError:
        return False
    return True


def check_loss(value: Any) -> None:
    """Refuse a loss that is not a tensor with one number."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"has shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__}"
        raise ConfigError(
            f"the loss {found}. Return a tensor with one number, such as (module(data) - data).square().mean()."
        )


def type_name(stepped: Any) -> str:
    """Name of the type of an optimizer or a scheduler, with those of the schedulers that it is made of.

    >>> type_name(None)
    'None'
    """
    if stepped is None:
        return "None"
    parts = ", ".join(map(type_name, getattr(stepped, "_schedulers", ())))
    return f"{type(stepped).__name__}({parts})" if parts else type(stepped).__name__


def check_settings(path: Path | None, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of a training with other settings, by their names."""
    others = [name for name, value in own.items() if stored.get(name) != value]
    if others:
        was, now = (", ".join(f"{name} {each.get(name)}" for name in others) for each in (stored, own))
        raise ConfigError(
            f"{path} is the checkpoint of another network or optimizer, or of other settings: it has {was}, and this training {now}. "
            "Write what it has, or another path."
        )


SLOTS = 4  # parts of a batch, by default
CHECKPOINT_SECONDS = 30.0
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
SlotData = Callable[[int, int], Any]
OnStep = Callable[[int, float], None]


def fit(
    group: TorchGroup,
    module: torch.nn.Module,
    batch: SlotData,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    slots: int = SLOTS,
    seed: int = 0,
    scheduler: Any = None,
    mode: Literal["exact", "fast"] = "exact",
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    report: OnStep = lambda step, value: None,
) -> list[float]:
    """Train a network on the ranks of a group; return the loss of every step.

    Each step has a batch in a fixed number of parts, the slots, which the ranks share. Their gradients are averaged in the order of the
    slots, so that on CPUs with the same number of threads the losses and the network have the same bits for any number of ranks, and
    after an interruption.

    Parameters
    ----------
    group : TorchGroup
        The ranks; all of them call this function.
    module : Module
        The network; that of rank 0 is copied to the others. Running statistics, as of batch norm, are averaged over the slots;
        integers that it keeps, such as counters, are those of the last slot.
    batch : callable
        ``batch(step, slot)`` returns the data of a slot, wherever it is called.
    loss : callable
        ``loss(module, data)`` returns the mean loss of a slot, a tensor with one number. Slots count equally, whatever the number of their
        samples. For the mean over samples give every slot as many, or return the sum over the samples times slots / (samples in the batch).
    optimizer : Optimizer
        Any of torch's that needs no closure, which leaves out LBFGS, for the parameters of the module. A parameter without a gradient in
        all slots of a step has none; one with a gradient in some slots has the mean with zeros in the others.
    steps : int
        Number of steps, those before an interruption included.
    slots : int
        Number of slots: at least as many as ranks.
    seed : int
        The random numbers of torch in a slot, such as those of dropout, follow from it, from the step and from the slot.
    scheduler : LRScheduler, optional
        Is stepped after each step. One that needs a metric, ReduceLROnPlateau, is refused.
    mode : {"exact", "fast"}
        fast: the ranks add gradients in the order of their backend, which exchanges less; the bits depend on their number.
    checkpoint : path, optional
        File on a disk that all ranks see. It keeps network, optimizer, scheduler and losses, and a call goes on from there, with as many
        steps or more.
    checkpoint_seconds : float
        Time between two writes of that file.
    report : callable
        Called by rank 0 with the number of steps that are done and the last loss.

    Raises
    ------
    ConfigError
        When there are fewer slots than ranks, the loss is not one number, the optimizer needs a closure, or the checkpoint is that of
        another training.
    Diverged
        When a loss is not finite.
    DamagedData
        When the checkpoint is damaged.
    PeerLost
        When another rank has ended.

    Examples
    --------
    >>> layer = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> points = lambda step, slot: torch.tensor([[float(slot)]])
    >>> losses = fit(TorchGroup(), layer, points, lambda f, x: (f(x) - 2 * x).square().mean(), optimizer, steps=200)
    >>> len(losses), losses[-1] < 1e-3
    (200, True)
    """
    check_arguments(group.world_size, slots, seed, mode)
    check_stepped_alone(optimizer, scheduler)
    training = _Training(group, module, optimizer, scheduler, slots, seed, mode)
    path = None if checkpoint is None else Path(checkpoint)
    losses = training.begin(path, steps)
    last_write = time.monotonic()
    for step in range(len(losses), steps):
        losses.append(training.step(batch, loss, step))
        if not math.isfinite(losses[-1]):
            raise Diverged(
                f"the loss is {losses[-1]} in step {step + 1} of {steps}. Write a smaller learning rate, or look at the images."
            )
        if group.rank == 0:
            report(step + 1, losses[-1])
            if path and (step + 1 == steps or time.monotonic() - last_write >= checkpoint_seconds):
                training.write(path, losses)
                last_write = time.monotonic()
    group.barrier()  # the checkpoint is there once any rank returns
    return losses


@dataclass(frozen=True)
class _Training:
    """Network, optimizer and scheduler of one rank."""

    group: TorchGroup
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    slots: int
    seed: int
    mode: str

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a training keeps when it goes on from a checkpoint."""
        return {
            "optimizer": type_name(self.optimizer),
            "scheduler": type_name(self.scheduler),
            "slots": int(self.slots),  # those of NumPy cannot be read again
            "seed": int(self.seed),
            "mode": self.mode,
        }

    @cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that are trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Running statistics and other tensors that the network keeps. In a step it may put others in their places."""
        return list(self.module.buffers())

    def begin(self, path: Path | None, steps: int) -> list[float]:
        """Start all ranks from the checkpoint that rank 0 reads, or else from its network; return the losses so far."""
        state = shared_state(path, self.group)
        if state is None:
            with torch.no_grad():
                for tensor in (*self.module.parameters(), *self.buffers):
                    tensor.copy_(self.group.broadcast(tensor))
            return []
        check_settings(path, state.get("settings", {}), self.settings)
        losses: list[float] = state["losses"]
        if steps < len(losses):
            raise ConfigError(
                f"{path} has {len(losses)} steps already, and steps is {steps}. Write steps={len(losses)} or more, or another path."
            )
        try:
            self.module.load_state_dict(state["module"])
            self._restore(state["buffers"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path} is the checkpoint of another network or optimizer. Write another path, or remove it."
            ) from error
        return losses

    def write(self, path: Path, losses: Sequence[float]) -> None:
        """Write the checkpoint."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        state = {
            "settings": self.settings,
            "module": self.module.state_dict(),
            "buffers": self.buffers,  # those that are not persistent as well
            "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler,
            "losses": list(losses),
        }
        write_state(path, state)

    def step(self, batch: SlotData, loss: LossFunction, step: int) -> float:
        """Do one step; return the mean loss of its slots."""
        before = [buffer.clone() for buffer in self.buffers]
        parts: dict[int, torch.Tensor] = {}
        for slot in self.group.slots(self.slots):
            self._restore(before)
            self.optimizer.zero_grad(set_to_none=True)
            with _random(self.seed, step, slot, self.group.device):
                value = loss(self.module, batch(step, slot))
            check_loss(value)
            value.backward()
            changes = [as_real(b) - _origin(a) for a, b in zip(before, self.buffers, strict=True) if _has_mean(b)]
            part = self._flat(value.detach(), changes)
            if self.group.is_alone and parts:
                parts[0] += part  # as they are summed anyway, without a copy of the gradients for each slot
            else:
                parts[slot] = part
            del part
        mean = self._average(parts)
        self._take(mean, before)
        self._take_last()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(mean[0])

    def _flat(self, value: torch.Tensor, changes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Loss, gradients, changes of the running statistics of a slot, and 1 for each parameter with a gradient, in one vector.

        What does not change has no rounding.
        """
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        has_gradient = value.new_tensor([p.grad is not None for p in self.parameters])
        tensors = [value, *map(as_real, gradients), *changes, has_gradient]
        dtype = max(map(wide_type, tensors), key=lambda each: torch.finfo(each).bits)
        return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])

    def _average(self, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        """The mean over all slots of all ranks; one rank alone has their sum already."""
        if self.group.is_alone:
            return parts[0] / self.slots
        one = next(iter(parts.values()))
        count_received(self._received_numbers(one.numel(), len(parts)) * one.itemsize)
        if self.mode == "exact":
            return self.group.sum_slots(parts, self.slots) / self.slots
        total = self.group.all_reduce(torch.stack(list(parts.values())).sum(0))
        return total / self.slots

    def _received_numbers(self, length: int, own_slots: int) -> int:
        """Return the number of numbers that this rank receives for a sum over the slots of vectors of a length."""
        rank, ranks = self.group.rank, self.group.world_size
        if self.mode == "fast":
            return 2 * length * (ranks - 1) // ranks  # in a ring: no all-reduce does with less
        share = (rank + 1) * length // ranks - rank * length // ranks
        return share * (self.slots - own_slots) + length - share

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _take(self, mean: torch.Tensor, before: Sequence[torch.Tensor]) -> None:
        """Set the gradients to their means and change the running statistics by theirs."""
        averaged = [(new, old) for new, old in zip(self.buffers, before, strict=True) if _has_mean(new)]
        sizes = [1, *(as_real(tensor).numel() for tensor in (*self.parameters, *(new for new, _ in averaged)))]
        _, *pieces, has_gradient = mean.split([*sizes, len(self.parameters)])
        for parameter, piece, share in zip(self.parameters, pieces, has_gradient.tolist(), strict=False):
            gradient = torch.empty_like(parameter)
            as_real(gradient).copy_(piece.view_as(as_real(gradient)))
            parameter.grad = gradient if share else None
        for (new, old), piece in zip(averaged, pieces[len(self.parameters) :], strict=True):
            as_real(new).copy_(_origin(old) + piece.view_as(as_real(old)))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _take_last(self) -> None:
        """Set what has no mean, such as counters, to its values in the last slot of all."""
        kept = [buffer for buffer in self.buffers if not _has_mean(buffer)]
        source = self.group.world_size - 1
        if not kept or not source:
            return
        packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in kept])
        if self.group.rank != source:
            count_received(packed.nbytes)
        pieces = self.group.broadcast(packed, source).split([buffer.nbytes for buffer in kept])
        for buffer, piece in zip(kept, pieces, strict=True):
            buffer.copy_(piece.clone().view(buffer.dtype).view_as(buffer))  # a clone is aligned

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _restore(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)


def _has_mean(buffer: torch.Tensor) -> bool:
    """True for numbers that are averaged over the slots."""
    return bool(buffer.is_floating_point() or buffer.is_complex())


def _origin(old: torch.Tensor) -> torch.Tensor:
    """Values that changes are counted from: 0 in place of those that are not finite, which have no difference from others."""
    return as_real(old).nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def _random(seed: int, step: int, slot: int, device: Any) -> Iterator[None]:
    """Random numbers of torch that follow from three numbers; those of the program go on as before afterwards."""
    (number,) = np.random.SeedSequence((seed, step, slot)).generate_state(1, np.uint64)
    cuda = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.manual_seed(int(number))
        yield


DIGEST_BYTES = 32
_MODE = 0o600


def write_state(path: Path, state: Mapping[str, Any], disk: Disk = DISK) -> None:
    """Replace a state of tensors, numbers and text; it is durable on return."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    view = content.getbuffer()
    disk.write_file(path, [hashlib.sha256(view).digest(), view], mode=_MODE)


def read_content(path: Path) -> bytes:
    """Return the content of a file, nothing where there is no file."""
    try:
        with path.open("rb") as file:
            digest, body = file.read(DIGEST_BYTES), file.read()
    except FileNotFoundError:
        return b""
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Write the path of a file for the checkpoint.") from None
    if hashlib.sha256(body).digest() != digest:
        raise DamagedData(f"{path} is damaged. Remove it to begin anew.")
    return body


def state_in(content: bytes | memoryview) -> dict[str, Any]:
    """Return the state in the content of a file. Code in it is not run."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def shared_state(path: Path | None, group: TorchGroup) -> dict[str, Any] | None:
    """Return the state in the file that rank 0 reads, on every rank; None where there is no file."""
    content = read_content(path) if path and group.rank == 0 else b""
    if group.world_size == 1:
        return state_in(content) if content else None
    size = int(group.broadcast(torch.tensor([len(content)], device=group.device)))
    if not size:
        return None
    sent = torch.zeros(size, dtype=torch.uint8)
    if content:
        sent.numpy()[:] = np.frombuffer(content, np.uint8)
    del content  # there may be no room for many copies
    return state_in(group.broadcast(sent.to(group.device)).cpu().numpy().data)
