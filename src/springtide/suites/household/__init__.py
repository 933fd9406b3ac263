"""Household: carrying things about a room seen only in part. Exports `SUITE`."""

from springtide.suites.household.environment import SUITE as SUITE
