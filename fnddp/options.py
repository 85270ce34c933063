"""Checks that transforms declare: of their options, `limits = {"parts": at_least(1)}`, and of pipelines inside."""

from fnddp.core.options import POSITIVE as POSITIVE
from fnddp.core.options import Limit as Limit
from fnddp.core.options import at_least as at_least
from fnddp.core.options import one_of as one_of
from fnddp.core.sync import require_agreement as require_agreement
from fnddp.core.sync import require_sums as require_sums
