"""Spec -> source -> cubin -> kernel, and the kernel cache. Nothing here depends on rope.

.. include:: README.md
"""
