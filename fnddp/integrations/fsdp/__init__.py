"""FSDP2: any pipeline between the replicas of a sharded model, and codecs for the messages of its shards."""

from fnddp.integrations.fsdp.axes import Compressed as Compressed
from fnddp.integrations.fsdp.axes import compress as compress
from fnddp.integrations.fsdp.axes import plan_axes as plan_axes
from fnddp.integrations.fsdp.matrices import Matrices as Matrices
from fnddp.integrations.fsdp.matrices import own_matrices as own_matrices
from fnddp.integrations.fsdp.replicas import Replicas as Replicas
from fnddp.integrations.fsdp.replicas import compress_replicas as compress_replicas
from fnddp.integrations.fsdp.shards import Shards as Shards
from fnddp.integrations.fsdp.shards import compress_shards as compress_shards
