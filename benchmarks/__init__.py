"""Benchmarks, checks of traces, and the report. Training imports nothing of this package.

- ``runner``: one training run in a process of its own, and the grid that makes the runs of suites and sweeps.
- ``suites``: methods side by side on cases. ``sweeps``: the largest model of each method. TOML files describe both.
- ``traces``: whether every copy ran in order; Perfetto draws.
- ``report``: the pages, from docs/results alone.
- ``verify``, ``faults``, ``soak``: equality to the bit, planted faults, long runs.
- ``pinned_memory``: the speed of reserving host memory, and of copies.

Rows have a schema (``rows``) and a file that grows and resumes (``store``). ``flags`` and ``names`` read a row's flags;
``table`` and ``pictures`` show rows.
"""
