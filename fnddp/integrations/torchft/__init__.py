"""torchft: replicas that may die, and come back, under any pipeline. Needs `pip install 'fnddp[torchft]'`."""

from fnddp.integrations.torchft.module import DistributedDataParallel, PureDistributedDataParallel
from fnddp.integrations.torchft.wire import ManagerWire, QuorumError

__all__ = ["DistributedDataParallel", "ManagerWire", "PureDistributedDataParallel", "QuorumError"]
