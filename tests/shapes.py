"""Checks the shapes and types in signatures while the tests run (see conftest.py)."""

import beartype

# An int is a float, as for every other checker (PEP 484).
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
