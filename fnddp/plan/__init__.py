"""Lowering: making a plan from a pipeline and parameters, pass by pass."""
