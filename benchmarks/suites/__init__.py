"""Every way of saving activation memory, side by side."""
