"""One variant of one network inside its own process: setting up, taking steps, its memory."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from step_models import NETWORKS
from step_workers import Job
from torch import Tensor, nn

import ucudnn

WARM_STEPS = 3
_ENGINES_TRIED = {"": 10, "all": 0}  # `benchmark_limit`: torch's default, and no limit
_AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Runner:
    """A model and its training step.

    Args:
        job: what to run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._network = NETWORKS[job.network]
        self._is_cuda = job.device == "cuda"
        torch.manual_seed(0)
        if job.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        if "benchmark" in job.parts:
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.benchmark_limit = _ENGINES_TRIED[job.parts["benchmark"]]
        torch.backends.cuda.matmul.allow_tf32 = job.dtype != "fp32"
        torch.backends.cudnn.allow_tf32 = job.dtype != "fp32"
        self._format = torch.contiguous_format
        if "channels_last" in job.parts:
            is_volume = len(self._network.shape) == 4
            self._format = torch.channels_last_3d if is_volume else torch.channels_last
        model = self._network.build(job.small).to(job.device)
        self._model: nn.Module = model.to(memory_format=self._format).train(job.train)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._scaler = torch.amp.GradScaler(job.device, enabled=job.dtype == "fp16")
        self._run: Callable[[Tensor], Any] = self._model
        self._plan: ucudnn.Plan | None = None

    def setup(self, warm_batch: int) -> dict[str, Any]:
        """Tune or compile, take the first steps, and tell what that took."""
        reply: dict[str, Any] = {"machine": self._machine()}
        x = self._inputs(self.job.batch)
        start = time.monotonic()
        if "ucudnn" in self.job.parts:
            reply["plan"] = self._follow_plan(x)
            reply["tune_s"] = time.monotonic() - start
        x = self._inputs(warm_batch)
        if self.job.memory_gib is not None and self._is_cuda:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(self.job.memory_gib * 2**30 / total)
        if "compile" in self.job.parts:
            self._run = torch.compile(self._model)
        start = time.monotonic()
        losses = [self._step(x) for _ in range(WARM_STEPS)]
        self._synchronize()
        reply["warm_s"] = time.monotonic() - start
        reply["loss"] = None if losses[0] is None else losses[0].item()
        reply["memory"] = self._memory()
        start_ns = time.perf_counter_ns()
        self._step(x)
        self._synchronize()
        return {**reply, "step_ns": time.perf_counter_ns() - start_ns}

    def steps(self, batch: int, count: int) -> dict[str, Any]:
        """Mean time of some steps between two readings of the clock, after one that warms up."""
        x = self._inputs(batch)
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._step(x)
        self._synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(count):
            self._step(x)
        self._synchronize()
        taken = (time.perf_counter_ns() - start_ns) // count
        return {"step_ns": taken, "memory": self._memory()}

    def digest(self, count: int) -> dict[str, Any]:
        """Hash of all weights after some steps on fixed inputs."""
        torch.manual_seed(1)
        x = self._inputs(self.job.batch)
        for _ in range(count):
            self._step(x)
        digest = hashlib.sha256()
        for weight in self._model.state_dict().values():
            digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return {"sha256": digest.hexdigest()}

    def save_plan(self, path: str) -> dict[str, Any]:
        """Write the plan that was tuned to a file."""
        assert self._plan is not None
        self._plan.save(path)
        return {}

    def release(self) -> None:
        """Give gradients and cached memory back."""
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _inputs(self, batch: int) -> Tensor:
        x = self._network.inputs(batch, self.job.small, self.job.device)
        return x.to(memory_format=self._format)

    def _autocast(self) -> Any:
        if self.job.dtype not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self.job.device, _AUTOCAST[self.job.dtype])

    def _step(self, x: Tensor) -> Tensor | None:
        """One step, enqueued; its loss, None without training."""
        with torch.set_grad_enabled(self.job.train), self._autocast():
            outputs = self._run(x)
        maps = outputs if isinstance(outputs, list) else [outputs]
        if not self.job.train:
            return None
        loss = torch.stack([one.float().square().mean() for one in maps]).sum()
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _follow_plan(self, x: Tensor) -> dict[str, Any]:
        limit = self.job.parts["ucudnn"]
        settings = {"workspace_limit": None if limit == "none" else limit}
        if not self._is_cuda:
            settings["backend"] = "torch_cpu"
        config = ucudnn.Config(**{**settings, **self.job.config})
        if self.job.plan is None:
            measured = 0

            def on_progress(event: Any) -> None:
                nonlocal measured
                measured = event.measured

            with self._autocast():
                plan = ucudnn.tune(self._model, x, config, on_progress)
        else:
            plan, measured = ucudnn.Plan.load(self.job.plan), 0
        self._plan = plan
        conversion = ucudnn.convert_(self._model, plan)
        return {
            "hash": plan.hash,
            "measured": measured,
            "kernels": len(plan.kernels),
            "not_default": sum(not kernel.is_default for kernel in plan.kernels),
            "divided": sum(
                len(kernel.split(kernel.problem.batch).chunks) > 1 for kernel in plan.kernels
            ),
            "workspace_bytes": plan.workspace_bytes,
            "conversion": str(conversion),
        }

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _memory(self) -> dict[str, int]:
        if not self._is_cuda:
            return {}
        return {
            "reserved": torch.cuda.max_memory_reserved(),
            "allocated": torch.cuda.max_memory_allocated(),
        }

    def _machine(self) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name() if self._is_cuda else "cpu",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "threads": torch.get_num_threads(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
