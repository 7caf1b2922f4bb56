"""Several ranks for each GPU, or for the cores of a CPU, started by torchrun's agent.

    agent.py        start the ranks, and clean up however they end
    placement.py    GPU, cores, threads and workspace of each rank
    utilization.py  how busy the GPUs are, and whether sharing them can pay
    search.py       the number of ranks with the most samples per second

What the launched processes themselves need is in `ucudnn.system`: it imports nothing.
"""
