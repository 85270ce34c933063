"""Gradient synchronization as composable pure transforms on gradient pytrees."""

from fnddp.adapters.ddp import Handle, register
from fnddp.adapters.functional import value_and_grad
from fnddp.adapters.hook import from_hook
from fnddp.adapters.jit import jit
from fnddp.adapters.module.wrapper import DistributedDataParallel
from fnddp.agreement import RankMismatchError, verify
from fnddp.compositions import batched_powersgd
from fnddp.cost.link import Link
from fnddp.cost.measure import measure_link
from fnddp.memory.error_feedback import error_feedback
from fnddp.parse import parse
from fnddp.plan.ir import LoweringError
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.reducers.all_reduce import all_reduce, allreduce
from fnddp.run.vote import StepFailedError
from fnddp.schedules.partition import partition
from fnddp.schedules.warmup import warmup
from fnddp.state import load_state_dict, state_dict
from fnddp.sync import Exchange, Local, Replicated, State, Sync, transform
from fnddp.transforms.bucketize import bucketize
from fnddp.transforms.cast import bf16, cast, fp16
from fnddp.transforms.powersgd import powersgd
from fnddp.transforms.squared import squared
from fnddp.wire.counter import WireCounter
from fnddp.wire.protocol import CollectiveError

__all__ = [
    "CollectiveError",
    "DistributedDataParallel",
    "Exchange",
    "Handle",
    "Link",
    "LoweringError",
    "Plan",
    "Local",
    "RankMismatchError",
    "Replicated",
    "State",
    "StepFailedError",
    "Sync",
    "WireCounter",
    "all_reduce",
    "allreduce",
    "batched_powersgd",
    "bf16",
    "bucketize",
    "cast",
    "error_feedback",
    "fp16",
    "from_hook",
    "jit",
    "load_state_dict",
    "lower",
    "measure_link",
    "parse",
    "partition",
    "powersgd",
    "register",
    "squared",
    "state_dict",
    "transform",
    "value_and_grad",
    "verify",
    "warmup",
]
