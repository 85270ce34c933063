"""Codecs as single operations; if Triton is installed, its kernels run them in one pass over memory."""
