"""Every change of upstream behaviour: one upstream symbol (or one seam) a file, registered and reversible."""
