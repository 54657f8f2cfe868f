"""Faults of the vendor's library that a case is known to meet."""

from neuron_moe.tools.vendor_cases.case import Case, Job


def explain(case: Case, job: Job, reason: str) -> str:
    """Return the reason of a failure, preceded by the library's fault where one is known."""
    return reason
