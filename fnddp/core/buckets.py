"""Buckets: leaves with payloads in one message, chosen by their sizes alone."""

from collections.abc import Mapping, Sequence

MB = 2**20
BUCKET_CAPS = (1 * MB, 25 * MB)  # those of torch's DDP


def assign_buckets(nbytes: Mapping[str, int], caps: Sequence[float]) -> dict[str, int]:
    """Return the number of each leaf's bucket, from 0: filled in the order of `nbytes`, closed once it holds its cap.

    Args:
        nbytes: Size of each leaf, in the order in which gradients are expected.
        caps: Bytes at which a bucket is closed: the first ones, and the last for all others. With a small first one
            communication starts early.

    Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3; torch's `compute_bucket_assignment_by_size`.

    >>> assign_buckets({"c": 10, "b": 10, "a": 10}, caps=[1, 20])
    {'c': 0, 'b': 1, 'a': 1}
    """
    buckets: dict[str, int] = {}
    bucket, filled = 0, 0
    for path, size in nbytes.items():
        buckets[path] = bucket
        filled += size
        if filled >= caps[min(bucket, len(caps) - 1)]:
            bucket, filled = bucket + 1, 0
    return buckets
