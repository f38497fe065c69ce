"""Long runs: what a process holds after thousands of steps, and whether losses stay equal to the bit."""
