"""Lowering: from a pipeline and parameters to a plan, pass by pass."""
