"""Runs one family in the environment that this is started in; JSON on standard output.

python -m compat.one spyx
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time

from compat.runner import run


def main(family: str) -> None:
    """Run every case of a family and print its versions and results."""
    module = importlib.import_module(f"compat.families.{family}")
    results = []
    for name, make in module.CASES.items():
        start = time.monotonic()
        result = run(name, make)
        seconds = time.monotonic() - start
        results.append({**result.as_dict(), "seconds": round(seconds, 1)})
        print(f"{family}: {name}: {result.verdict} ({seconds:.0f} s)", file=sys.stderr)
    versions = {n: importlib.metadata.version(n) for n in (module.PACKAGE, "jax")}
    # The last line, in case the package prints as it is imported.
    found = {"package": module.PACKAGE, "versions": versions, "results": results}
    print(json.dumps({"name": getattr(module, "NAME", module.PACKAGE), **found}))


if __name__ == "__main__":
    main(sys.argv[1])
