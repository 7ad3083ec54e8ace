"""The GPU path, in Triton. Of the layer nothing outside this package imports Triton, and nothing imports this package before it is needed.

Read in the order of the data flow: memory, signals, schedule, dispatch, experts, forward, combine; then groups, gradients, backward.
forward_hopper and backward_hopper do the same tasks in Gluon, which a Hopper runs faster. What ends in fp8 or mxfp8 is another form for
quantized experts, and launch... are the host's side.
"""
