"""Other projects' own rope tests, run with jitrope in place of their rope: `python -m tests.peers --list`.

Nothing of theirs is copied here. Each row of `table.PEERS` names their test files in a checkout that the user gives,
and a module here whose `install` puts jitrope where those files import the peer from.
"""
