"""Random numbers for authors of transforms, as pure functions of a name, a seed and a step."""

from fnddp.core.codec import Key as Key
from fnddp.core.random import integers as integers
from fnddp.core.random import normal as normal
from fnddp.core.random import uniform as uniform
