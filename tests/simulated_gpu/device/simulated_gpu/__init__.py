"""A GPU that is not there: torch.cuda on the CPU, real cuDNN's lists, plans and refusals.

`install` changes the torch and the ucudnn of a process so that code written for a GPU runs to its
end. Real: cuDNN's proposals for a device profile, every plan it builds, what it refuses, which
addresses, strides and workspace a launch is given. Simulated: the launch, computed on the CPU from
those addresses alone, in float64; streams, events, graphs, and the names of the device. A failing
GPU is simulated, too: see `faults`.

Its times are those of a CPU under load and mean nothing. The device is called "simulated" wherever
a result names it, and no process may write into benchmarks/results. Left out: torch.compile
(returns the model as it is), asynchrony, CUDA graphs (a replay does nothing), peaks of memory (all
zero; see `memory`) and NVML. Every tensor claims to be on the GPU unless it was moved to the CPU.

Environment:

    SIMULATED_GPU           the profile of the device, such as benchmarks/devices/h200.json
    SIMULATED_GPU_STUBS     folder to build the stub of the driver in
    SIMULATED_GPU_CUDNN     libcudnn.so.9, where torch was built without CUDA
    SIMULATED_GPU_FAULTS    folder of failures to come, see `faults`
    SIMULATED_GPU_MEMORY    folder of what each process has allocated, see `memory`
    SIMULATED_GPU_PATIENCE  seconds after which a candidate hangs, instead of those of the backend
"""

from __future__ import annotations

import os
from pathlib import Path


def install() -> None:
    """Let this process, and those that it starts, see the simulated GPU."""
    from simulated_gpu import cuda, cudnn, results, tensors

    results.protect()
    # cuDNN first: it is loaded with the stubs, and real tensors are needed for none of it
    profile = Path(os.environ["SIMULATED_GPU"]).read_text()
    cudnn.load(Path(os.environ["SIMULATED_GPU_STUBS"]), os.environ.get("SIMULATED_GPU_CUDNN"))
    tensors.install()
    cuda.install(profile)
    cudnn.install(profile)
