"""`DistributedDataParallel`: a wrapped module whose backward passes are steps of a pipeline."""
