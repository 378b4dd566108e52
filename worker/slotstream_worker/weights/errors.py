"""What can be wrong with a version of the weights; each message says what to do."""

from __future__ import annotations

from slotstream.errors import SlotstreamError


class WeightsError(SlotstreamError):
    """Something about a version of the weights; the base of the others."""


class BadWeights(WeightsError):
    """What is to be published is no set of weights, or a version that cannot be."""


class Incomplete(WeightsError):
    """Not every rank has published its shards; says which have not."""


class Refused(WeightsError):
    """A worker does not take a version: it is wrong, and would be for every worker like this one.

    `phase`: `planned` or `verified` where the version itself is wrong; `staging` or `digest` where
    its bytes did not come, or not right, which may be this worker's or the way's fault; `lease`
    where it is not there.
    """

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.phase = phase


class ShardGone(WeightsError):
    """A shard's bytes are not where the manifest says; another source may have them."""


class BadBytes(WeightsError):
    """A shard's bytes are not those of its digest; another source may have better ones."""


class InUse(WeightsError):
    """A version cannot be deleted: it is the current one, or read, or named by a session's row."""
