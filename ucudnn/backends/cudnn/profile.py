"""Device profile: a JSON file from which cuDNN can plan for a GPU without having it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Descriptor, Handle
from ucudnn.backends.cudnn.constants import DEVICELESS_SINCE, Attribute, Kind
from ucudnn.errors import ConfigError, UnsupportedError
from ucudnn.system.files import parse_json

# Fields that cuDNN requires; it may write further ones.
_COUNTS = (
    *("cudaDeviceId", "deviceVer", "driverVer", "isTccDriver", "l2CacheSize", "maxCtasPerSM"),
    *("maxRegistersPerSM", "maxSharedMemoryPerBlock", "maxSharedMemoryPerBlockOptin"),
    *("maxThreadsPerBlock", "maxThreadsPerSM", "memClockRateKHz"),
    *("multiProcessorCount", "pciDeviceId", "regsPerBlock", "reservedSharedMemoryPerBlock"),
    *("smClockRateKHz", "supportCoopLaunch", "totalGlobalMem", "warpSize"),
)
# Three numbers each, for the axes x, y and z.
_SIZES = ("maxBlockSize", "maxGridSize")
_NAME = "deviceName"
REQUIRED_FIELDS = (*_COUNTS, *_SIZES, _NAME)
# Some release after 9.20 began to ask for it; a profile that an older one wrote may lack it.
NEWER_FIELDS = ("memoryBusWidth",)

_OWN = Path(__file__).parent / "profiles"


def own_profiles() -> list[str]:
    """Names of the profiles that the package has.

    >>> own_profiles()
    ['h200']
    """
    return sorted(file.stem for file in _OWN.glob("*.json"))


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A GPU, as cuDNN describes it.

    Args:
        name: the driver's name of it, such as "NVIDIA H200".
        compute_capability: its architecture, such as "9.0".
        text: the JSON that cuDNN reads.
        source: the file that it was read from, for messages.
    """

    name: str
    compute_capability: str
    text: str
    source: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Read a profile, as `ucudnn doctor --save-device-profile` writes it.

        >>> DeviceProfile.load("h200").name
        'NVIDIA H200'

        Args:
            path: of the file, or the name of a profile that the package has.

        Raises:
            ConfigError: it cannot be read, or a field is missing or invalid; the message names the
                field.
        """
        # A file of the user goes before one of the package.
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
        """Check the JSON of a profile.

        Args:
            text: the JSON.
            source: where the JSON comes from, for messages.

        Raises:
            ConfigError: as for `load`.
        """
        try:
            fields = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the device profile {source} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"the device profile {source} must be a JSON object, got {text:.40}")
        _require(REQUIRED_FIELDS, fields, f"the device profile {source} lacks")
        # Checked here, so that the error names the field and the file.
        for name in (*REQUIRED_FIELDS, *NEWER_FIELDS):
            if name in fields and not _is_valid(name, fields[name]):
                raise ConfigError(
                    f"the device profile {source}: {name} must be {_rule(name)}, "
                    f"got {fields[name]!r}"
                )
        # deviceVer is 900 for compute capability 9.0.
        major, minor = divmod(fields["deviceVer"] // 10, 10)
        return cls(fields[_NAME], f"{major}.{minor}", text, source)

    @classmethod
    def of_handle(cls, cudnn: Cudnn, handle: Handle) -> DeviceProfile:
        """The profile of a device of this machine.

        Args:
            cudnn: the library.
            handle: of the device.
        """
        return cls.parse(cls.text_of_handle(cudnn, handle), "of this device")

    @staticmethod
    def text_of_handle(cudnn: Cudnn, handle: Handle) -> str:
        """The JSON in which cuDNN describes a device of this machine.

        Args:
            cudnn: the library.
            handle: of the device.
        """
        _require_deviceless(cudnn)
        with Descriptor(cudnn, Kind.DEVICEPROP) as device:
            device.set_handle(Attribute.DEVICEPROP_HANDLE, handle)
            return device.finalize().get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile for `load`.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            # Indented, because people compare and edit profiles.
            Path(path).write_text(json.dumps(json.loads(self.text), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write the device profile {path}: {error.strerror}"
            ) from error

    def descriptor(self, cudnn: Cudnn) -> Descriptor:
        """Make the descriptor with which cuDNN plans for the device.

        Args:
            cudnn: the library.

        Raises:
            ConfigError: the library needs a field that the profile lacks.
            UnsupportedError: the library is too old for this, or does not know the architecture.
        """
        _require_deviceless(cudnn)
        device = Descriptor(cudnn, Kind.DEVICEPROP)
        # The text as it was read: cuDNN may use fields that this module does not know.
        device.set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, self.text)
        try:
            return device.finalize()
        except CudnnError as error:
            # A failure of the library says nothing about the profile.
            if not error.is_refusal:
                raise
            _require(
                NEWER_FIELDS,
                json.loads(self.text),
                f"cuDNN {cudnn.version_text} asks for what the device profile {self.source} lacks:",
            )
            raise UnsupportedError(
                f"cuDNN {cudnn.version_text} does not plan for the device of the profile "
                f"{self.source} ({self.name}, compute capability {self.compute_capability}): "
                f"{error}"
            ) from error


def _require_deviceless(cudnn: Cudnn) -> None:
    # Older releases have no descriptor of device properties.
    if cudnn.version < DEVICELESS_SINCE:
        raise UnsupportedError(
            f"device profiles need cuDNN 9.8 or newer, {cudnn.path} is {cudnn.version_text}; "
            f"install a newer torch, or cuDNN alone: pip install --no-deps nvidia-cudnn-cu13"
        )


def _require(names: Iterable[str], fields: Mapping[str, object], said: str) -> None:
    missing = [name for name in names if name not in fields]
    if missing:
        raise ConfigError(
            f"{said} {', '.join(missing)}; write a whole one on the device: "
            f"ucudnn doctor --save-device-profile FILE"
        )


def _is_valid(name: str, value: object) -> bool:
    if name == _NAME:
        return isinstance(value, str)
    if name in _SIZES:
        return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))
    return _is_count(value)


def _is_count(value: object) -> bool:
    # `isinstance` would let true and false pass: bool is a subclass of int.
    return type(value) is int and value >= 0


def _rule(name: str) -> str:
    if name == _NAME:
        return "a text"
    return "a list of three ints" if name in _SIZES else "an int of at least 0"
