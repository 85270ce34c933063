"""Gradient synchronization as composable pure transforms on gradient pytrees."""

from fnddp.memory.error_feedback import error_feedback
from fnddp.reducers.all_reduce import all_reduce, allreduce
from fnddp.schedules.partition import partition
from fnddp.schedules.warmup import warmup
from fnddp.sync import Exchange, Sync, transform
from fnddp.transforms.batched_powersgd import batched_powersgd
from fnddp.transforms.bucketize import bucketize
from fnddp.transforms.cast import bf16, cast, fp16
from fnddp.transforms.powersgd import powersgd
from fnddp.transforms.squared import squared
