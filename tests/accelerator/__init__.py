"""A device made of the CPU, and what trains on it: with the CPU's bits, in whatever order its streams run.

device.h says what the device is, and build.py builds it. All tests are of the second ring.
"""
