"""Outer steps: local SGD, DiLoCo and related methods, for ranks that exchange once in several steps."""

from fnddp.outer.attach import Attached as Attached
from fnddp.outer.attach import attach as attach
from fnddp.outer.compositions import muloco as muloco
from fnddp.outer.compositions import sparse_loco as sparse_loco
from fnddp.outer.contract import Outer as Outer
from fnddp.outer.contract import outer as outer
from fnddp.outer.contract import parse as parse
from fnddp.outer.des_loc import des_loc as des_loc
from fnddp.outer.diloco import diloco as diloco
from fnddp.outer.local_sgd import hierarchical_local_sgd as hierarchical_local_sgd
from fnddp.outer.local_sgd import local_sgd as local_sgd
from fnddp.outer.local_sgd import post_local_sgd as post_local_sgd
from fnddp.outer.plan import OuterPlan as OuterPlan
from fnddp.outer.plan import lower as lower
from fnddp.outer.simulate import OuterSimulation as OuterSimulation
from fnddp.outer.simulate import simulate as simulate
from fnddp.outer.simulate import simulate_training as simulate_training
from fnddp.outer.streaming_diloco import streaming_diloco as streaming_diloco
