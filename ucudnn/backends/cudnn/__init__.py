"""cuDNN backend, which calls cuDNN's versioned C graph API directly.

The modules, from the library outward; each uses only modules above it:

    constants.py    the numbers of cudnn_graph.h that are used here, by their names
    api.py          libcudnn, descriptors, handles and errors: C made typed, nothing decided
    profile.py      a device as a JSON file, from which cuDNN can plan without it
    graph.py        a problem as cuDNN's operation graph: target, tensor views, pattern
    engine.py       a problem's engine configurations: list them, name them, build one by its name
    offline.py      in a child process, without a driver: lists and tables of configurations
    runtime.py      on a GPU: handles, plans that all threads share, launches
    executable.py   on a GPU: an engine by its identity as the executable that trains and is timed
    gpu.py          on a GPU: names and state of the device, memory for measuring
    backend.py      on a GPU: the contract of `ucudnn.backends`, from the modules above

To build on a device of this machine: `Target(cudnn, handle=handle)` of graph.py, then
`build(target, problem, identity, beta=0.0)` of engine.py. To plan for another one, in the child:
`Target(cudnn, device=profile.descriptor(cudnn))`, then the same calls.
"""
