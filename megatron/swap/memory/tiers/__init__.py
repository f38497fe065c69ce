"""Tiers, the places that offloaded bytes are copied to: pinned host memory, a disk behind it. One contract, `base`."""
