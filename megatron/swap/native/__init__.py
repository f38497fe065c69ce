"""Transfers by a thread that needs no interpreter: C++, built on first use, and a twin in Python where it cannot be."""
