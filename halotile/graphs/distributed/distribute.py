"""The function that runs objects of deepinv, or networks, on the workers of a context."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from halotile.errors import ConfigError, WrongKind
from halotile.graphs.distributed.context import DistributedContext


def distribute(
    object: Any,  # noqa: A002 - deepinv's word for it
    ctx: DistributedContext,
    *,
    num_operators: int | None = None,
    type_object: str | None = "auto",
    dtype: Any = None,
    gather_strategy: str = "concatenated",
    reduction: str | None = "sum",
    exact: bool = False,
    reach: int | Literal["auto"] | None = None,
    shared: Mapping[str, Any] | None = None,
    factory_kwargs: Mapping[str, Any] | None = None,
    tiling_strategy: Any = None,
    tiling_dims: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] = 256,
    overlap: int | Sequence[int] = 64,
    max_batch_size: int | None = None,
    images_per_task: int | None = None,
    blending: str | None = None,
    unsafe: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a distributed form of an object: the same inputs and outputs, computed by workers.

    Parameters
    ----------
    object : object
        A ``StackedPhysics``, a list or tuple of physics, or one of them; a ``DataFidelity``, a
        ``StackedPhysicsDataFidelity`` or a list; a ``Denoiser``, any network or function, a ``Prior`` with a
        denoiser; an unfolded ``BaseOptim`` model, which is changed in place; or a factory ``(index, device,
        shared)`` of physics or fidelities, called on the workers.
    ctx : DistributedContext
        An open context.
    num_operators : int, optional
        Number of operators that a factory makes.
    type_object : str
        ``physics``, ``linear_physics``, ``denoiser``, ``prior``, ``data_fidelity``, ``module``,
        ``parameters``; ``auto`` detects it from the type of the object.
    dtype : torch.dtype, optional
        Accepted for compatibility with deepinv; dtypes stay as they are.
    gather_strategy : str
        ``naive``, ``concatenated`` or ``broadcast``: accepted for compatibility with deepinv, with one
        meaning.
    reduction : str, optional
        Reduction of the terms of a fidelity: ``sum``, ``mean``, or None for a list. A physics accepts it for
        compatibility with deepinv, and its adjoint stays the sum; its methods take another reduction as
        ``reduce_op=``.
    exact : bool
        Compute convolutions of large images by direct sums alone, and ``A^T A`` as it is written. Otherwise
        large kernels use Fourier transforms, and the blurs of a stack become one kernel: within 1e-6 (root
        mean square), and faster.
    reach : int or "auto", optional
        Reach in pixels of operators that halotile does not know; ``auto`` tries them on small images. With
        it, large images are computed block by block. It declares that the operators are the same everywhere
        in the image.
    shared, factory_kwargs : mapping, optional
        The argument ``shared`` of a factory. The two are the same.
    tiling_strategy : str or object, optional
        ``overlap_tiling`` (also when left out), ``basic`` (no overlap), or an object with the methods of
        ``deepinv.distributed.strategies.DistributedSignalStrategy``.
    tiling_dims : int or tuple of int, optional
        Axes that a denoiser's images are cut along; all but the first two when left out.
    patch_size, overlap : int or tuple of int
        Size of the tiles, and width of the halo that they are computed with on each side.
    max_batch_size : int, optional
        Tiles that are processed at once.
    images_per_task : int, optional
        Images of a batch that are processed at once, for networks that treat them one by one: a batch is then spread over
        the workers. All of them when left out.
    blending : str, optional
        ``linear`` or ``hann`` blends neighbouring tiles where they overlap, with weights that add up to 1. It
        hides the seams of a denoiser whose receptive field exceeds ``overlap``. Within ``overlap`` there are
        no seams, and only tiles without blending give the result of the whole image: blending mixes in pixels
        that lack part of their neighbourhood.
    unsafe : bool
        Call a denoiser that depends on the whole image, such as one with a normalisation or attention over
        all pixels, on tiles nevertheless: otherwise it is refused when an image is cut for the first time.
    **kwargs
        Other keywords of deepinv, which have no effect here: ``checkpoint_batches`` and the like.

    Returns
    -------
    object
        A ``deepinv.physics.LinearPhysics`` for a stack of linear operators; a ``torch.nn.Module`` for the
        others.

    Raises
    ------
    ConfigError
        When the object or an option is not valid.

    Examples
    --------
    >>> import torch
    >>> from halotile import DistributedContext, distribute
    >>> with DistributedContext(workers=1) as ctx:
    ...     halve = distribute(torch.nn.Hardtanh(0, 1), ctx, type_object="denoiser", patch_size=8, overlap=0)
    ...     float(halve(torch.full((1, 1, 12, 12), 3.0)).mean())
    1.0
    """
    from halotile.tasks.distributed.build import build
    from halotile.tasks.distributed.tiling.processing import TilingOptions

    if unknown := sorted(set(kwargs) - set(IGNORED_KEYWORDS)):
        raise WrongKind(f"distribute() has no keyword {unknown[0]!r}. See help(halotile.distribute).")
    if shared is not None and factory_kwargs is not None:
        raise ConfigError("shared and factory_kwargs were both given, and mean the same. Write one of them.")
    tiling = TilingOptions(
        strategy=tiling_strategy or "overlap_tiling",
        patch_size=patch_size,
        overlap=overlap,
        tiling_dims=tiling_dims,
        max_batch_size=max_batch_size,
        images_per_task=images_per_task,
        blending=blending,
        unsafe=unsafe,
    )
    return build(
        object,
        ctx,
        type_object or "auto",
        count=num_operators,
        shared=shared if factory_kwargs is None else factory_kwargs,
        tiling=tiling,
        dtype=dtype,
        gather_strategy=gather_strategy,
        reduction=reduction,
        exact=exact,
        reach=reach,
    )


_OF_CHECKPOINTS = ("checkpoint_batches", "checkpoint_use_reentrant", "checkpoint_preserve_rng_state")
# Keywords of deepinv for behaviour that is always on here, or that a single driver does not need.
IGNORED_KEYWORDS = (*_OF_CHECKPOINTS, "average")
