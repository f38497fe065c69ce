"""Checks of a profiler's trace: whether every copy ran when it should, and whether it was hidden.

``kineto`` and ``nsys`` read ``records``; ``engine``, ``storages`` and ``device`` find what ran; ``checks`` judge it.
"""
