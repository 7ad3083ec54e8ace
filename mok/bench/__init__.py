"""What the layer reaches, and beside what: suites that check before they time and write one object of rows each.

    timing.py     contestants take turns              report.py  the written object: machine, sources, rows
    baselines.py  the same layer by torch and NCCL    ranks.py   one process per GPU, under a watchdog
    ep.py         whole layers over several GPUs      comm.py    rows and signals between two GPUs
"""
