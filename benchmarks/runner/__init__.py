"""Measured runs, each in a process of its own: ``grid`` makes those of suites and sweeps, ``launch`` starts one."""
