"""The passes of lowering: each takes a draft of a plan and returns one. `fnddp/plan/lower.py` has their order."""
