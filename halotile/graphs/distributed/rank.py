"""The rank interface of deepinv's distributed context, for the only rank there is: the driver."""

from __future__ import annotations

from typing import Any, TypeVar

Value = TypeVar("Value")


class SingleRank:
    """Collectives of a single rank, which has no others to communicate with.

    Examples
    --------
    >>> rank = SingleRank()
    >>> rank.rank, rank.local_indices(3), rank.all_reduce(5)
    (0, [0, 1, 2], 5)
    """

    rank = 0
    local_rank = 0
    use_dist = False
    created_dist = False
    world_size = 1

    @property
    def local_world_size(self) -> int:
        """Number of workers, the same as ``world_size``."""
        return self.world_size

    def local_indices(self, num_items: int) -> list[int]:
        """List the items of this rank, which are all of them."""
        return list(range(num_items))

    def all_reduce(self, x: Value, op: Any = None, group: Any = None) -> Value:
        """Return the input: there is nothing to add to it."""
        return x

    def broadcast(self, x: Value, src: int = 0, group: Any = None) -> Value:
        """Return the input."""
        return x

    def all_gather(self, x: Any, group: Any = None) -> Any:
        """Return the input with a leading axis of one rank."""
        return x[None]

    def all_gather_object(self, obj_list: list[Any], obj: Any, group: Any = None) -> None:
        """Put the object in the first place of the list."""
        if obj_list:
            obj_list[0] = obj

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, device: Any = None) -> list[Any]:
        """Return the list."""
        return object_list

    def barrier(self) -> None:
        """Return at once: there is no other rank to wait for."""

    def get_backend(self) -> str:
        """Return ``dask``."""
        return "dask"
