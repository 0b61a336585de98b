"""The version, where the build finds it without importing anything."""

__version__ = "0.1.0"
