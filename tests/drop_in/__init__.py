"""`fnddp.DistributedDataParallel` in the place of torch's class: every argument, every method, every kind of model.

Where both do the same sums, on two ranks, they must agree to the bit. Elsewhere the reference is the pipeline called
by hand on the gradients of the bare module.
"""
