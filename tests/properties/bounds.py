"""How long a property may look: some seconds each, the same examples in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(number: int) -> settings:
    """At most ``number`` examples; a busy machine is no failure."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
