"""libcudnn and its graph API as Python objects: descriptors, handles, errors.

All numbers of cuDNN's header come from `constants`. Every status other than success becomes a
`CudnnError`. ctypes releases the interpreter lock during each call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Self

from ucudnn.backends.cudnn.constants import Attribute, DataType, DescriptorKind, Type
from ucudnn.errors import UcudnnError, UnsupportedError

# cuDNN cuts its last error message off at the size of the buffer that it is given.
_MESSAGE_BYTES = 4096
# The name has the major version, because cuDNN keeps its C interface within a major version.
_FILE = "libcudnn.so.9"
# Folders of libcudnn in the nvidia-cudnn wheels, and in torch wheels that bring their own libcudnn.
_WHEEL_FOLDERS = ("nvidia/cudnn/lib", "torch/lib")


class CudnnError(UcudnnError):
    """A call of cuDNN that returned a status other than success.

    Attributes:
        status: number of the status, such as 3000.
        name: name of the status, such as "CUDNN_STATUS_NOT_SUPPORTED".
        detail: cuDNN's own last message, which may be empty.
        doing: what the call was to do, such as "execute a plan".
    """

    def __init__(self, status: int, name: str, detail: str, doing: str) -> None:
        said = f": {detail}" if detail else ""
        super().__init__(f"cuDNN could not {doing}: {name} ({status}){said}")
        self.status, self.name, self.detail, self.doing = status, name, detail, doing

    @property
    def is_refusal(self) -> bool:
        """True if cuDNN declined the request: BAD_PARAM (2xxx) or NOT_SUPPORTED (3xxx)."""
        # The first digit is the category of a status in cuDNN 9; 4xxx and 5xxx are failures.
        return 2000 <= self.status < 4000

    # By default an exception is unpickled by calling `__init__` with the message alone, but it
    # takes four arguments.
    def __reduce__(self) -> tuple[type[CudnnError], tuple[int, str, str, str]]:
        return type(self), (self.status, self.name, self.detail, self.doing)


def find_library() -> Path:
    """Find the libcudnn that torch has loaded or would load, without loading it.

    This is the libcudnn that the process has mapped. If the process has mapped none and no CUDA
    build of torch is loaded, the result is the first libcudnn in the folders of installed wheels or
    in the library folder of the environment.
    """
    mapped = _mapped_library()
    if mapped is not None:
        return mapped
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        raise UnsupportedError(
            f"torch {torch.__version__} carries cuDNN inside itself, where nothing else can call "
            f"it; install a torch that depends on the nvidia-cudnn wheel"
        )
    folders = [Path(entry or os.curdir, folder) for entry in sys.path for folder in _WHEEL_FOLDERS]
    for folder in (*folders, Path(sys.prefix, "lib")):
        if (folder / _FILE).is_file():
            return (folder / _FILE).resolve()
    raise UnsupportedError(
        f"no {_FILE} is installed here; install torch for CUDA, or cuDNN alone: "
        f"pip install --no-deps nvidia-cudnn-cu13"
    )


def _mapped_library() -> Path | None:
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text(errors="replace").splitlines():
            # A line of /proc/self/maps ends in the absolute path of the file, if it has one.
            path = line.partition("/")[2]
            if path.rpartition("/")[2].startswith(_FILE):
                return Path("/", path)
    return None


class Cudnn:
    """A loaded libcudnn."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            # RTLD_GLOBAL lets cuDNN's sub-libraries find each other's symbols. A later load of a
            # library with the same name then finds this copy.
            library = ctypes.CDLL(self.path, mode=ctypes.RTLD_GLOBAL)
            self._declare(library)
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"cannot load cuDNN 9 from {self.path}: {error}") from error
        self.version = int(library.cudnnGetVersion())

    def _declare(self, library: ctypes.CDLL) -> None:
        # Without these declarations ctypes treats results and arguments as C ints, and cuts
        # pointers and sizes to 32 bits. Functions without a restype here return a status, an int.
        library.cudnnGetVersion.restype = c_size_t
        library.cudnnGetErrorString.restype = c_char_p
        library.cudnnGetErrorString.argtypes = [c_int]
        library.cudnnGetLastErrorString.restype = None
        library.cudnnGetLastErrorString.argtypes = [c_char_p, c_size_t]
        library.cudnnCreate.argtypes = [POINTER(c_void_p)]
        library.cudnnDestroy.argtypes = [c_void_p]
        library.cudnnSetStream.argtypes = [c_void_p, c_void_p]
        library.cudnnBackendCreateDescriptor.argtypes = [c_int, POINTER(c_void_p)]
        library.cudnnBackendDestroyDescriptor.argtypes = [c_void_p]
        library.cudnnBackendFinalize.argtypes = [c_void_p]
        library.cudnnBackendSetAttribute.argtypes = [c_void_p, c_int, c_int, c_int64, c_void_p]
        library.cudnnBackendGetAttribute.argtypes = [
            c_void_p,
            c_int,
            c_int,
            c_int64,
            POINTER(c_int64),
            c_void_p,
        ]
        library.cudnnBackendExecute.argtypes = [c_void_p, c_void_p, c_void_p]
        self.functions = library

    @property
    def version_text(self) -> str:
        """The version as people write it, such as "9.28.0"."""
        # cuDNN 9 encodes 9.28.0 as 92800.
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def check(self, status: int, doing: str) -> None:
        """Raise a CudnnError unless a status is success."""
        if status:
            message = ctypes.create_string_buffer(_MESSAGE_BYTES)
            self.functions.cudnnGetLastErrorString(message, _MESSAGE_BYTES)
            name = self.functions.cudnnGetErrorString(status).decode()
            raise CudnnError(status, name, message.value.decode(errors="replace").strip(), doing)

    def tensor(
        self,
        uid: int,
        dtype: DataType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        alignment_bytes: int,
        virtual: bool = False,
    ) -> Descriptor:
        """Describe a tensor."""
        tensor = Descriptor(self, DescriptorKind.TENSOR)
        tensor.set_enum(Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, dtype)
        tensor.set_int64(Attribute.TENSOR_DIMENSIONS, *shape)
        tensor.set_int64(Attribute.TENSOR_STRIDES, *strides)
        tensor.set_int64(Attribute.TENSOR_UNIQUE_ID, uid)
        # cuDNN trusts the claimed alignment: engines that load several elements at once need it.
        tensor.set_int64(Attribute.TENSOR_BYTE_ALIGNMENT, alignment_bytes)
        # The attribute is false by default, and is set only for the tensor between convolution and
        # bias, which needs no memory.
        if virtual:
            tensor.set_bool(Attribute.TENSOR_IS_VIRTUAL, True)
        return tensor.finalize()


class Descriptor:
    """A cuDNN object, whose attributes are set before it is finalized and can be read afterwards.

    A descriptor keeps alive the descriptors that it was made from.
    """

    __slots__ = ("_cudnn", "_parts", "kind", "pointer")

    def __init__(self, cudnn: Cudnn, kind: DescriptorKind) -> None:
        self._cudnn = cudnn
        # cuDNN refers to the parts by pointer, so they must not be destroyed before this object.
        self._parts: tuple[Descriptor, ...] = ()
        self.kind = kind
        # Null until the object is created: `__del__` also runs after a failed creation.
        self.pointer = c_void_p()
        create = cudnn.functions.cudnnBackendCreateDescriptor
        cudnn.check(create(kind, byref(self.pointer)), f"create {kind.name}")

    def __del__(self) -> None:
        # When Python exits, the driver may already be unloaded. Then nothing is done here, and the
        # operating system frees the object, as it does for PyTorch's plans.
        if self.pointer and not sys.is_finalizing():
            self._cudnn.functions.cudnnBackendDestroyDescriptor(self.pointer)

    def _set(self, attribute: Attribute, kind: Type, count: int, values: object) -> None:
        set_attribute = self._cudnn.functions.cudnnBackendSetAttribute
        status = set_attribute(self.pointer, attribute, kind, count, values)
        self._cudnn.check(status, f"set {attribute.name}")

    def set_int64(self, attribute: Attribute, *values: int) -> None:
        """Set one or more integers."""
        self._set(attribute, Type.INT64, len(values), (c_int64 * len(values))(*values))

    def set_enum(self, attribute: Attribute, kind: Type, value: int) -> None:
        """Set a value of one of cuDNN's enumerations."""
        self._set(attribute, kind, 1, byref(c_int(value)))

    def set_bool(self, attribute: Attribute, value: bool) -> None:
        """Set a truth value."""
        self._set(attribute, Type.BOOLEAN, 1, byref(c_bool(value)))

    def set_float(self, attribute: Attribute, value: float, double: bool = False) -> None:
        """Set a number in single or double precision."""
        if double:
            self._set(attribute, Type.DOUBLE, 1, byref(ctypes.c_double(value)))
        else:
            self._set(attribute, Type.FLOAT, 1, byref(ctypes.c_float(value)))

    def set_text(self, attribute: Attribute, text: str) -> None:
        """Set a text."""
        data = text.encode() + b"\0"
        self._set(attribute, Type.CHAR, len(data), data)

    def set_pointers(self, attribute: Attribute, *addresses: int) -> None:
        """Set addresses of memory."""
        self._set(attribute, Type.VOID_PTR, len(addresses), (c_void_p * len(addresses))(*addresses))

    def set_handle(self, attribute: Attribute, handle: Handle) -> None:
        """Set the handle that the object belongs to."""
        self._set(attribute, Type.HANDLE, 1, byref(handle.pointer))

    def set_descriptors(self, attribute: Attribute, *parts: Descriptor) -> None:
        """Set descriptors that the object is made from; they live as long as the object."""
        array = (c_void_p * len(parts))(*(part.pointer for part in parts))
        self._set(attribute, Type.BACKEND_DESCRIPTOR, len(parts), array)
        self._parts += parts

    def finalize(self) -> Self:
        """Finalize the object, so that it can be used and read."""
        status = self._cudnn.functions.cudnnBackendFinalize(self.pointer)
        self._cudnn.check(status, f"finalize {self.kind.name}")
        return self

    def _get(self, attribute: Attribute, kind: Type, capacity: int, values: object) -> int:
        get_attribute, count = self._cudnn.functions.cudnnBackendGetAttribute, c_int64()
        status = get_attribute(self.pointer, attribute, kind, capacity, byref(count), values)
        self._cudnn.check(status, f"get {attribute.name}")
        return count.value

    def get_int64(self, attribute: Attribute) -> int:
        """Read an integer."""
        value = c_int64()
        self._get(attribute, Type.INT64, 1, byref(value))
        return value.value

    def get_enum(self, attribute: Attribute, kind: Type) -> int:
        """Read a value of one of cuDNN's enumerations."""
        value = c_int()
        self._get(attribute, kind, 1, byref(value))
        return value.value

    def get_enums(self, attribute: Attribute, kind: Type) -> list[int]:
        """Read a list of values of one of cuDNN's enumerations."""
        # A call with a capacity of 0 returns the number of values in the list.
        values = (c_int * self._get(attribute, kind, 0, None))()
        self._get(attribute, kind, len(values), values)
        return list(values)

    def get_text(self, attribute: Attribute) -> str:
        """Read a text."""
        text = ctypes.create_string_buffer(self._get(attribute, Type.CHAR, 0, None))
        self._get(attribute, Type.CHAR, len(text), text)
        return text.value.decode()

    def get_descriptors(self, attribute: Attribute, kind: DescriptorKind) -> list[Descriptor]:
        """Read a list of descriptors."""
        count = self._get(attribute, Type.BACKEND_DESCRIPTOR, 0, None)
        # The caller must make the descriptors, which cuDNN then fills.
        return self.read_into([Descriptor(self._cudnn, kind) for _ in range(count)], attribute)

    def read_into(self, parts: list[Descriptor], attribute: Attribute) -> list[Descriptor]:
        """Read a list of descriptors into existing descriptors; return those that were filled.

        cuDNN does not return the number of knob choices before the choices themselves, so the
        caller must give enough descriptors for any engine.
        """
        array = (c_void_p * len(parts))(*(part.pointer for part in parts))
        return parts[: self._get(attribute, Type.BACKEND_DESCRIPTOR, len(parts), array)]


class Handle:
    """cuDNN's context on the current device of this thread; one thread at a time may use it."""

    __slots__ = ("_cudnn", "pointer")

    def __init__(self, cudnn: Cudnn) -> None:
        self._cudnn = cudnn
        # Null until the handle is created: `__del__` also runs after a failed creation.
        self.pointer = c_void_p()
        pointer = c_void_p()
        cudnn.check(cudnn.functions.cudnnCreate(byref(pointer)), "open the device")
        self.pointer = pointer

    def set_stream(self, stream: int) -> None:
        """Set the CUDA stream on which later calls enqueue their kernels."""
        status = self._cudnn.functions.cudnnSetStream(self.pointer, stream)
        self._cudnn.check(status, "set the stream")

    def __del__(self) -> None:
        # When Python exits, the operating system frees the handle, as it frees descriptors.
        if self.pointer and not sys.is_finalizing():
            self._cudnn.functions.cudnnDestroy(self.pointer)
