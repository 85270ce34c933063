"""Outer steps: local SGD, DiLoCo and related methods, for ranks that exchange once in several steps."""

from fnddp.outer.attached import Attached as Attached
from fnddp.outer.attached import attach as attach
from fnddp.outer.contract import Outer as Outer
from fnddp.outer.contract import outer as outer
from fnddp.outer.contract import parse as parse
from fnddp.outer.plan import OuterPlan as OuterPlan
from fnddp.outer.plan import lower as lower
from fnddp.outer.simulation import OuterSimulation as OuterSimulation
from fnddp.outer.simulation import simulate as simulate
from fnddp.outer.simulation import simulate_training as simulate_training
from fnddp.outer.steps.compositions import muloco as muloco
from fnddp.outer.steps.compositions import sparse_loco as sparse_loco
from fnddp.outer.steps.des_loc import des_loc as des_loc
from fnddp.outer.steps.diloco import diloco as diloco
from fnddp.outer.steps.local_sgd import hierarchical_local_sgd as hierarchical_local_sgd
from fnddp.outer.steps.local_sgd import local_sgd as local_sgd
from fnddp.outer.steps.local_sgd import post_local_sgd as post_local_sgd
from fnddp.outer.steps.streaming_diloco import streaming_diloco as streaming_diloco
