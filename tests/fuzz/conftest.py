"""The process that forks the worlds of cases."""

from tests.integration.conftest import zygote

__all__ = ["zygote"]
