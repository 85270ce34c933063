"""Compatibility of `DistributedDataParallel` with torch's class: arguments and names."""
