"""The C++ parts, built on first use: the transfer queue, storages that refuse access, the out-of-memory guard.

Owns the sources and their build. May import `common`.
"""
