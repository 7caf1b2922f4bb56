"""cuDNN backend, which calls cuDNN's versioned C graph API directly.

In these modules a plan is cuDNN's execution plan: an engine that is ready to run on tensors of
certain shapes, strides and alignments. Each module imports only modules above it in this list:

    constants.py    the numbers of cudnn_graph.h that are used here, by their names
    api.py          libcudnn, descriptors, handles and errors: typed wrappers of the C functions
    profile.py      a device as a JSON file, from which cuDNN can plan without the device
    graph.py        a problem as cuDNN's operation graph, for a device and for layouts of tensors
    engine.py       a problem's engine configurations: list them, name them, build one by its name
    offline.py      in a child process, without a driver: lists and tables of configurations
    runtime.py      on a GPU: handles, plans that all threads share, launches
    executable.py   on a GPU: the executables of engines and of torch's own convolution
    gpu.py          on a GPU: names and state of the device, memory for measuring
    backend.py      on a GPU: `AbstractBackend` of `ucudnn.backends`, made of the modules above

To build a plan on a device of this machine, call `Target(cudnn, handle=handle)` of graph.py, then
`build_plan(target, problem, identity, beta=0.0)` of engine.py. To plan for a device that is not
here, call `Target(cudnn, device=profile.descriptor(cudnn))` in the child process, then
`build_plan`.
"""
