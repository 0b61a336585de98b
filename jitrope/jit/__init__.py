"""Spec -> source -> cubin -> kernel, and where kernels are kept. Knows nothing of rope.

.. include:: README.md
"""
