"""Output for users: tables, a line for each iteration, the summary file, the memory report.

Owns texts and files; decides nothing. May import `optimizer`, `engine` and everything below.
"""
