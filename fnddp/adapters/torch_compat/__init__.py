"""Compatibility of `DistributedDataParallel` with torch's class: arguments, logging data and names."""
