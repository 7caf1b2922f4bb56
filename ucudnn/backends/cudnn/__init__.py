"""cuDNN backend, which calls cuDNN's versioned C graph API directly.

The modules, from the library outward; each uses only modules above it:

    constants.py    the numbers of cudnn_graph.h that are used here, by their names
    api.py          libcudnn, descriptors, handles and errors: C made typed, nothing decided
    library.py      which libcudnn this process is to use
    profile.py      a device as a JSON file, from which cuDNN can plan without it
    graph.py        a problem as cuDNN's operation graph: target, tensor views, pattern
    engine.py       a problem's engine configurations: list them, name them, build one by its name
    runtime.py      on a GPU: handles, plans that all threads share, launches
    executable.py   on a GPU: an engine by its identity as the executable that trains and is timed
    raw.py          on a GPU: memory for measuring that is not torch's
    identity.py     on a GPU: names of device and software, and what may perturb times
    backend.py      on a GPU: the contract of `ucudnn.backends`, from the modules above
    driverless.py   stub libraries where there is no NVIDIA driver, for a child process alone
    deviceless.py   that child, and the functions that talk to it; nothing is run on a device

To build on a device of this machine: `Target(cudnn, handle=handle)` of graph.py, then
`build(target, problem, identity, beta=0.0)` of engine.py. To plan for another one, in the child:
`Target(cudnn, device=profile.descriptor(cudnn))`, then the same calls.
"""
