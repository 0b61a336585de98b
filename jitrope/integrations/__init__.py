"""In place of a host library's rope: a module a host.

.. include:: README.md
"""
