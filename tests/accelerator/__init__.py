"""A device made of the CPU, and what trains on it: with the CPU's bits, in whatever order its streams run.

device.h says what the device is, build.py builds it. Tests are of the second ring: `pytest -m thorough tests/accelerator`.
"""
