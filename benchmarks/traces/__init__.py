"""Reads a profiler's trace of a swapping run and judges it: did every copy run when it should, and was it hidden."""
