"""`python -m jitrope.integrations.diffusers`: the table of the README."""

from .coverage import table

print(table())
