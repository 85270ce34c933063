"""FSDP2: any pipeline between the replicas of a sharded model, and codecs for the messages of its shards."""

from fnddp.integrations.fsdp.axes import Compressed, compress, plan_axes
from fnddp.integrations.fsdp.matrices import Matrices, own_matrices
from fnddp.integrations.fsdp.replicas import Replicas, compress_replicas
from fnddp.integrations.fsdp.shards import Shards, compress_shards

__all__ = [
    "Compressed",
    "Matrices",
    "Replicas",
    "Shards",
    "compress",
    "compress_replicas",
    "compress_shards",
    "own_matrices",
    "plan_axes",
]
