"""`python -m jitrope` is the `jitrope` command."""

from .tools.cli import main

main()
