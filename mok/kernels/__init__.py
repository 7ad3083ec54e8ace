"""The GPU path, in Triton. Nothing outside this package imports Triton, and nothing imports this package before it is needed.

Read in the order of the data flow: memory, signals, schedule, dispatch, experts, forward, combine.
"""
