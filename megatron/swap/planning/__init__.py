"""The planner inside a training run: measures steps, makes plans, tries them, applies the best.

Owns the state machine (profile, search, stable), the controller that carries it out, and the agreement of ranks. May
import `reporting` and everything below. It knows the layer boundaries only as a protocol of `engine`.
"""
