"""`make compat`: models of packages from PyPI, served in company, against the packages' own calls.

Each family stands in a virtual environment of its own under `.compat/`, which is kept. A module of
`compat.families` gives cases: a `StreamModel`, and the package's own function over a whole stream.
"""
