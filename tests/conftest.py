"""Settings of the whole suite: property tests are not timed, since a test machine may be shared and slow."""

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
