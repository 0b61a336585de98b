"""`python -m jitrope` is the `jitrope` command."""

from .cli import main

main()
