"""PowerSGD of whole buckets: not a transform of its own but a named composition of three."""

from fnddp.core.sync import Sync, registry
from fnddp.transforms.bucketize import bucketize
from fnddp.transforms.powersgd import powersgd
from fnddp.transforms.squared import squared


def batched_powersgd(
    inner: Sync,
    rank: int = 1,
    *,
    cap_mb: float = 25,
    first_cap_mb: float = 1,
    warm_start: bool = True,
    orthogonalization: str = "cholesky",
    epsilon: float = 1e-6,
    seed: int = 0,
) -> Sync:
    """PowerSGD of each flattened bucket as one square matrix: torch's `batched_powerSGD_hook`.

    Faster than `powersgd` (two products a bucket), usually much less accurate: bucketing destroys the row and column
    structure that low rank lives on. Consider `powersgd` first, and this only where rank 1 is good enough.

    Args:
        inner: The pipeline of the factors.
        rank: Columns of P and Q.
        cap_mb, first_cap_mb: Bucket sizes in MiB, see `bucketize`.
        warm_start, orthogonalization, epsilon, seed: See `powersgd`.

    >>> from fnddp import allreduce
    >>> batched_powersgd(allreduce, rank=2)
    bucketize(squared(powersgd(allreduce, rank=2, min_compression_rate=0)))
    """
    low_rank = powersgd(
        inner,
        rank=rank,
        warm_start=warm_start,
        min_compression_rate=0,
        orthogonalization=orthogonalization,
        epsilon=epsilon,
        seed=seed,
    )
    return bucketize(squared(low_rank), cap_mb=cap_mb, first_cap_mb=first_cap_mb)


registry.add("batched_powersgd", batched_powersgd)
