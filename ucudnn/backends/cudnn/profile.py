"""Device profile: a JSON file from which cuDNN can plan for a GPU that is not here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from msgspec import ValidationError, convert, defstruct

from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Descriptor, Handle
from ucudnn.backends.cudnn.constants import DEVICELESS_SINCE, Attribute, DescriptorKind
from ucudnn.errors import ConfigError, UnsupportedError
from ucudnn.system.files import parse_json
from ucudnn.units import Count

# Fields that cuDNN requires; a profile that cuDNN writes may have further fields.
_COUNTS = (
    *("cudaDeviceId", "deviceVer", "driverVer", "isTccDriver", "l2CacheSize", "maxCtasPerSM"),
    *("maxRegistersPerSM", "maxSharedMemoryPerBlock", "maxSharedMemoryPerBlockOptin"),
    *("maxThreadsPerBlock", "maxThreadsPerSM", "memClockRateKHz"),
    *("multiProcessorCount", "pciDeviceId", "regsPerBlock", "reservedSharedMemoryPerBlock"),
    *("smClockRateKHz", "supportCoopLaunch", "totalGlobalMem", "warpSize"),
)
_KINDS = {
    **dict.fromkeys(_COUNTS, Count),
    **dict.fromkeys(("maxBlockSize", "maxGridSize"), tuple[Count, Count, Count]),  # x, y, z
    "deviceName": str,
}
REQUIRED_FIELDS = tuple(_KINDS)
# A release after 9.20 began to require these fields; profiles of older releases may lack them.
NEWER_FIELDS = ("memoryBusWidth",)
_Properties = defstruct(
    "_Properties", [*_KINDS.items(), *((name, Count | None, None) for name in NEWER_FIELDS)]
)
_REMEDY = "write a whole one on the device: ucudnn doctor --save-device-profile FILE"

_OWN = Path(__file__).parent / "profiles"


def own_profiles() -> list[str]:
    """Names of the profiles that are part of the package.

    >>> own_profiles()
    ['h200']
    """
    return sorted(file.stem for file in _OWN.glob("*.json"))


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A GPU, as cuDNN describes it."""

    name: str
    compute_capability: str
    text: str
    source: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Read a profile that `ucudnn doctor --save-device-profile` wrote, or one of the package.

        >>> DeviceProfile.load("h200").name
        'NVIDIA H200'
        """
        # If there is a file at this path, it is read, and not the package's profile of that name.
        name = os.fspath(path)
        is_own = name in own_profiles() and not Path(path).exists()
        try:
            text = (_OWN / f"{name}.json" if is_own else Path(path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"cannot read the device profile {path}: {reason}; it must be a file, or a profile "
                f"that ucudnn has: {', '.join(own_profiles())}"
            ) from error
        return cls.parse(text, os.fspath(path))

    @classmethod
    def parse(cls, text: str, source: str) -> DeviceProfile:
        """Check the JSON text of a profile, and make the profile."""
        try:
            fields = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the device profile {source} is no JSON: {error}") from None
        # The fields are checked here and not by cuDNN, so that the error names field and file.
        try:
            convert(fields, _Properties)
        except ValidationError as error:
            raise ConfigError(f"the device profile {source}: {error}; {_REMEDY}") from None
        # deviceVer is 900 for compute capability 9.0.
        major, minor = divmod(fields["deviceVer"] // 10, 10)
        return cls(fields["deviceName"], f"{major}.{minor}", text, source)

    @staticmethod
    def text_of_handle(cudnn: Cudnn, handle: Handle) -> str:
        """The JSON in which cuDNN describes a device of this machine."""
        _require_deviceless(cudnn)
        device = Descriptor(cudnn, DescriptorKind.DEVICEPROP)
        device.set_handle(Attribute.DEVICEPROP_HANDLE, handle)
        return device.finalize().get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile for `load`."""
        try:
            # The JSON is indented, because people compare and edit profiles.
            Path(path).write_text(json.dumps(json.loads(self.text), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write the device profile {path}: {error.strerror}"
            ) from error

    def descriptor(self, cudnn: Cudnn) -> Descriptor:
        """Make the descriptor with which cuDNN plans for the device."""
        _require_deviceless(cudnn)
        device = Descriptor(cudnn, DescriptorKind.DEVICEPROP)
        # cuDNN gets the text as it was read, because it may use fields that are unknown here.
        device.set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, self.text)
        try:
            return device.finalize()
        except CudnnError as error:
            if not error.is_refusal:
                raise
            known = json.loads(self.text)
            if missing := [name for name in NEWER_FIELDS if name not in known]:
                raise ConfigError(
                    f"cuDNN {cudnn.version_text} asks for what the device profile {self.source} "
                    f"lacks: {', '.join(missing)}; {_REMEDY}"
                ) from None
            raise UnsupportedError(
                f"cuDNN {cudnn.version_text} does not plan for the device of the profile "
                f"{self.source} ({self.name}, compute capability {self.compute_capability}): "
                f"{error}"
            ) from error


def _require_deviceless(cudnn: Cudnn) -> None:
    if cudnn.version < DEVICELESS_SINCE:
        raise UnsupportedError(
            f"device profiles need cuDNN 9.8 or newer, {cudnn.path} is {cudnn.version_text}; "
            f"install a newer torch, or cuDNN alone: pip install --no-deps nvidia-cudnn-cu13"
        )
