"""Keys of the versions in Redis, and names: of versions, of tensors.

The catalogue's keys lie in one hash slot, so that one script can change several; chunks lie
wherever their own names put them, so that a cluster shares the reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from slotstream.names import check_app
from slotstream_worker.weights.errors import BadWeights

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_version(version: str) -> str:
    """Return `version` if it is a valid version name, else raise `BadWeights`."""
    if not _VERSION.fullmatch(version):
        raise BadWeights(
            "a version's name is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or a "
            f"digit, got {version!r}"
        )
    return version


def catalogue_prefix(app: str) -> str:
    """What every key of an app's catalogue begins with."""
    return f"{check_app(app)}:weights:{{{app}}}:"


def chunk_key(app: str, prefix: str, k: int) -> str:
    """Key of chunk `k` of what was written under `prefix`."""
    return f"{app}:weights:chunk:{prefix}:{k}"


def words(name: str) -> tuple[str, ...]:
    """A tensor's name in its parts: `params/Dense_0/kernel` and `params.Dense_0.kernel` alike."""
    return tuple(word for word in re.split(r"[/.]", name) if word)


def match(leaves: Sequence[str], tensors: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Which tensor belongs to each of the model's leaves, and the tensors that belong to none.

    Names are equal up to `/` or `.` between their parts. A leading `params` may be missing on
    either side, as where a file holds the parameters alone, and so may a last `value`, in which
    nnx keeps the array of a Variable.

    Raises:
        BadWeights: two tensors for one leaf.
    """
    wanted: dict[tuple[str, ...], str] = {}
    for name in leaves:
        for key in _spellings(words(name)):
            wanted.setdefault(key, name)
    wanted.update({words(name): name for name in leaves})  # a leaf's own name before any other's
    found: dict[str, str] = {}
    over: list[str] = []
    for tensor in tensors:
        leaf = next((wanted[key] for key in _spellings(words(tensor)) if key in wanted), None)
        if leaf is None:
            over.append(tensor)
        elif leaf in found:
            raise BadWeights(
                f"two tensors are meant for {leaf}: {found[leaf]} and {tensor}; give it once"
            )
        else:
            found[leaf] = tensor
    return found, over


def _spellings(key: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A name, and what it is without a leading `params`, a last `value`, or both."""
    found = [key]
    if key[:1] == ("params",) and len(key) > 1:
        found.append(key[1:])
    return found + [name[:-1] for name in found if name[-1:] == ("value",) and len(name) > 1]


def flatten(tree: Mapping[str, object] | object, name: str = "") -> dict[str, object]:
    """Leaves of nested mappings and sequences by name, parts joined with `/`."""
    found: dict[str, object] = {}
    if isinstance(tree, Mapping):
        items: Iterable[tuple[object, object]] = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {name or "weights": tree}
    for key, value in items:
        found.update(flatten(value, f"{name}/{key}" if name else str(key)))
    return found
