"""Trees of tensors, for authors of transforms: leaves by path, and back."""

from fnddp.core.tree import Leaves as Leaves
from fnddp.core.tree import Spec as Spec
from fnddp.core.tree import Tree as Tree
from fnddp.core.tree import check_entries as check_entries
from fnddp.core.tree import flatten as flatten
from fnddp.core.tree import is_inexact as is_inexact
from fnddp.core.tree import map_leaves as map_leaves
from fnddp.core.tree import ordered as ordered
from fnddp.core.tree import require_leaves as require_leaves
from fnddp.core.tree import unflatten as unflatten
