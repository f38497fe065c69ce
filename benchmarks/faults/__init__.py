"""Plants faults in the product, one at a time, each in a copy of the tree, and reports which ones the tests catch."""
