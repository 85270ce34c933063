"""Adapters that connect pipelines to training loops: functional loops, torch's DDP, torch's hooks."""
