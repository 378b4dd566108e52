"""One module a family: `PACKAGE`, its name on PyPI, and `CASES`, a function each that makes one.

`NAME` says which part of the package it is, where it is one.
"""
