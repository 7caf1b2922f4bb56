"""What tests ask cuDNN, run in a process that has stubs in place of the NVIDIA driver.

Reads lines [function, arguments] and answers ["value", result] or ["error", traceback]. The first
arguments are a libcudnn, a device profile and the folder for the stubs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Descriptor, Handle
from ucudnn.backends.cudnn.constants import Attribute, DescriptorKind, Type
from ucudnn.backends.cudnn.engine import build_plan, configurations
from ucudnn.backends.cudnn.graph import Target, View, Views, views_of
from ucudnn.backends.cudnn.offline import has_driver, load_stubs
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.errors import UcudnnError, UnsupportedError
from ucudnn.problem import Problem

Fields = dict[str, Any]


def version() -> int:
    return TARGET.cudnn.version


def loaded_libraries() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if ".so" in line})


def import_of(name: str) -> str:
    """The exception that importing a module raises here."""
    try:
        __import__(name)
    except ImportError as error:
        return type(error).__name__
    return ""


def found(problem: Fields, alignment: int = 0) -> list[Any]:
    """[identity, mode, workspace, notes] of each configuration."""
    known = Problem(**problem)
    views = views_of(known)
    if alignment:
        views = Views(*(View(view.strides, alignment) for view in views))
    listed = configurations(TARGET, known, views=views)
    return [[one.identity, one.mode, one.workspace_bytes, "+".join(one.notes)] for one in listed]


def rebuilt(
    problem: Fields, source: Fields | None = None, beta: float = 0.0, bias: bool = False
) -> list[Any]:
    """[identity, proposed workspace, built workspace or None where refused] of precompiled ones.

    Args:
        problem: what to build for.
        source: where the identities come from; None: the problem itself.
        beta: factor of the result's old value.
        bias: of the fused pattern.
    """
    target = Problem(**problem)
    views = views_of(target)
    origin = target if source is None else Problem(**source)
    listed = configurations(TARGET, origin, views=None if source else views, bias=bias)
    built = []
    for one in listed:
        if not one.is_runtime_compiled:
            try:
                plan = build_plan(TARGET, target, one.identity, beta=beta, views=views)
                workspace: int | None = plan.workspace_bytes
            except UnsupportedError:
                workspace = None
            built.append([one.identity, one.workspace_bytes, workspace])
    return built


def refusal(problem: Fields, identity: str | None, views: list[Any] | None = None) -> list[str]:
    """Class and message of what building raises; of what listing raises if no identity is given."""
    given = views and Views(*(View(tuple(strides), alignment) for strides, alignment in views))
    try:
        if identity is None:
            configurations(TARGET, Problem(**problem))
        else:
            build_plan(TARGET, Problem(**problem), identity, views=given)
    except UcudnnError as error:
        return [type(error).__name__, str(error)]
    return []


def serialized(
    problem: Fields,
    identity: str = "",
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: bool = False,
    within: Fields | None = None,
) -> Any:
    """What cuDNN writes of a plan; of the first that is not compiled where no identity is given."""
    known = Problem(**problem)
    views = views_of(known, None if within is None else Problem(**within))
    if not identity:
        listed = configurations(TARGET, known, views=views, bias=bias)
        identity = next(one.identity for one in listed if not one.is_runtime_compiled)
    plan = build_plan(TARGET, known, identity, alpha=alpha, beta=beta, views=views)
    return json.loads(plan.descriptor.get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION))


def refused_profile(changes: Fields) -> list[str]:
    """What reading a changed profile raises: class and message; [] where cuDNN takes it."""
    fields = {**json.loads(PROFILE.text), **changes}
    kept = {name: value for name, value in fields.items() if value is not None}
    try:
        DeviceProfile.parse(json.dumps(kept), "changed.json").descriptor(TARGET.cudnn)
    except UcudnnError as error:
        return [type(error).__name__, str(error)]
    return []


def fields_that_cudnn_requires() -> list[str]:
    """Without which of a profile's fields cuDNN itself refuses it."""
    fields = json.loads(PROFILE.text)
    required = []
    for name in fields:
        rest = {other: value for other, value in fields.items() if other != name}
        device = Descriptor(TARGET.cudnn, DescriptorKind.DEVICEPROP)
        device.set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, json.dumps(rest))
        try:
            device.finalize()
        except CudnnError:
            required.append(name)
    return sorted(required)


def error_of_a_wrong_attribute() -> list[Any]:
    """A tensor takes no heuristic mode."""
    tensor = Descriptor(TARGET.cudnn, DescriptorKind.TENSOR)
    try:
        tensor.set_enum(Attribute.ENGINEHEUR_MODE, Type.HEUR_MODE, 0)
    except CudnnError as error:
        return [error.status, error.name, error.doing, error.is_refusal]
    return []


def error_of_opening_the_device() -> list[Any]:
    try:
        Handle(TARGET.cudnn)
    except CudnnError as error:
        return [error.status, error.name, error.is_refusal]
    return []


def descriptors_kept(problem: Fields) -> int:
    """Bytes of memory that a hundred listings and plans leave behind."""
    known = Problem(**problem)
    identity = configurations(TARGET, known)[0].identity

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = 0
    for round_ in range(120):
        configurations(TARGET, known)
        build_plan(TARGET, known, identity)
        if round_ == 20:
            before = resident()
    return resident() - before


def serve() -> None:
    functions = globals()
    # What libraries print must not get between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer = ["value", functions[name](**arguments)]
            except Exception:  # noqa: BLE001 - the test that asked fails with it
                answer = ["error", traceback.format_exc()]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    if not has_driver():
        load_stubs(Path(sys.argv[3]))
    PROFILE = DeviceProfile.load(sys.argv[2])
    _CUDNN = Cudnn(sys.argv[1])
    TARGET = Target(_CUDNN, device=PROFILE.descriptor(_CUDNN))
    serve()
