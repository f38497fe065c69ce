"""A run that plans itself: measures, plans, tries, follows.

Owns the state machine (profile, search, stable), the controller that carries it out, and what ranks agree on. May
import `reporting` and everything below. Asks the model's boundaries for a protocol of `engine` alone.
"""
