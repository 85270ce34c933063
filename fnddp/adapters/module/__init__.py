"""`DistributedDataParallel`: a wrapped module that runs each backward pass as a step of a pipeline."""
