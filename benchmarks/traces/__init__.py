"""Checks of a profiler's trace: whether every copy ran when it should, and whether it was hidden.

Readers of both profilers (``kineto``, ``nsys``) make ``records``. ``engine`` finds the engine's ranges and copies in
them, ``storages`` each storage's history, ``device`` the compute. ``checks`` and ``figures`` judge; ``analysis`` puts
all together. Perfetto draws.
"""
