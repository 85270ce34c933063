"""Codecs as single operations, which Triton's kernels run in one pass over memory where there is Triton."""
