"""Replacements for the rope of host libraries, one module for each library.

.. include:: README.md
"""
