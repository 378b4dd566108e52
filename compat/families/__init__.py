"""One module a family: `PACKAGE`, its name on PyPI, and `CASES`, a function each that makes one."""
