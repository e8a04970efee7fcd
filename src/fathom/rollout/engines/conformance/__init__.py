"""The suite that every adapter of the engine port passes.

A test hands each case of `CASES` a `Subject`: the engine, and how to publish a version to it.
"""

from __future__ import annotations

from fathom.rollout.engines.conformance.barriers import BARRIER_CASES
from fathom.rollout.engines.conformance.distributions import DISTRIBUTION_CASES
from fathom.rollout.engines.conformance.endings import ENDING_CASES
from fathom.rollout.engines.conformance.routes import ROUTE_CASES
from fathom.rollout.engines.conformance.subject import Case, Subject
from fathom.rollout.engines.conformance.versions import VERSION_CASES

CASES: tuple[Case, ...] = (*ENDING_CASES, *DISTRIBUTION_CASES, *ROUTE_CASES, *VERSION_CASES, *BARRIER_CASES)
"""Every case. They may share one engine, one after the other; each publishes what it needs."""

__all__ = ["CASES", "Case", "Subject"]
