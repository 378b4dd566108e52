"""New weights without stopping: publish, stage, verify, apply, release.

    from slotstream_worker.weights import publish
    publish(client, variables, version="step-1200")

A trainer publishes a *version*: an immutable manifest and its bytes. Each worker stages it in the
background (`receiver`), verifies every digest, and then lets each session change to it at its own
next checkpoint (`residents`), so that no replay mixes versions and nothing stalls.
"""

from slotstream_worker.weights.errors import BadWeights, Incomplete, InUse, WeightsError
from slotstream_worker.weights.manifest import Manifest
from slotstream_worker.weights.pieces import Piece
from slotstream_worker.weights.publish import publish, publish_file

__all__ = [
    "BadWeights",
    "InUse",
    "Incomplete",
    "Manifest",
    "Piece",
    "WeightsError",
    "publish",
    "publish_file",
]
