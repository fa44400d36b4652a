"""Mutants of this repository's sources: `operators` has the changes, `live` puts one into effect, `session` runs tests.

`tests/mutants.py` is the command for functions that Python runs, `tests/kernel_mutants.py` the one for the functions
that the simulator compiles. Imports pytest and coverage, nothing of the product.
"""
