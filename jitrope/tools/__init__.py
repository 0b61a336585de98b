"""The command line, and kernels built ahead of time."""

from ..plan import spec as spec  # it adds its kinds of kernels to those that can be read
