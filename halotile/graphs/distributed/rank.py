"""What deepinv's scripts ask a rank, where there is one: the driver."""

from __future__ import annotations

from typing import Any, TypeVar

Some = TypeVar("Some")


class OneRank:
    """Collectives of a single rank, which has nobody to talk to.

    Examples
    --------
    >>> alone = OneRank()
    >>> alone.rank, alone.local_indices(3), alone.all_reduce(5)
    (0, [0, 1, 2], 5)
    """

    rank = 0
    local_rank = 0
    use_dist = False
    created_dist = False
    world_size = 1

    @property
    def local_world_size(self) -> int:
        """The number of workers, as ``world_size``."""
        return self.world_size

    def local_indices(self, num_items: int) -> list[int]:
        """The items that belong to this rank: there is one, so all of them."""
        return list(range(num_items))

    def all_reduce(self, x: Some, op: Any = None, group: Any = None) -> Some:
        """What it is given: one rank has nobody to add to it."""
        return x

    def broadcast(self, x: Some, src: int = 0, group: Any = None) -> Some:
        """What it is given."""
        return x

    def all_gather(self, x: Any, group: Any = None) -> Any:
        """What it is given with an axis of one rank in front."""
        return x[None]

    def all_gather_object(self, obj_list: list[Any], obj: Any, group: Any = None) -> None:
        """Put the object in the first place."""
        if obj_list:
            obj_list[0] = obj

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, device: Any = None) -> list[Any]:
        """What it is given."""
        return object_list

    def barrier(self) -> None:
        """Nothing to wait for."""

    def get_backend(self) -> str:
        """``dask``."""
        return "dask"
