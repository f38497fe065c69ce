"""The fixtures of the tests that run the real trainer."""

from tests.integration.conftest import shared_runs, trainer, zygote

__all__ = ["shared_runs", "trainer", "zygote"]
