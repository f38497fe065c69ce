"""What a user reads: tables, the line of an iteration, the summary file, where every byte is.

Owns texts and files, no decisions. May import `optimizer`, `engine` and everything below.
"""
