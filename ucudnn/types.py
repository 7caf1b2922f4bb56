"""Types of what public functions return, take and report: for annotations and `isinstance`.

Errors and warnings are in `ucudnn.errors`.

>>> from ucudnn.types import Conversion, Policy
>>> Conversion.__module__
'ucudnn.convert'
"""

from ucudnn.advice import Advice as Advice
from ucudnn.advice import KernelAdvice as KernelAdvice
from ucudnn.advice import Largest as Largest
from ucudnn.config import Backend as Backend
from ucudnn.config import Effort as Effort
from ucudnn.config import Layout as Layout
from ucudnn.config import Policy as Policy
from ucudnn.config import Solver as Solver
from ucudnn.config import Unplanned as Unplanned
from ucudnn.convert import Conversion as Conversion
from ucudnn.execution.override import Installation as Installation
from ucudnn.execution.validity import Finding as Finding
from ucudnn.kernels.noise import Noise as Noise
from ucudnn.kernels.results import Progress as Progress
from ucudnn.layer_table import Row as Row
from ucudnn.measurement import Candidate as Candidate
from ucudnn.measurement import Conditions as Conditions
from ucudnn.measurement import Device as Device
from ucudnn.measurement import FailureKind as FailureKind
from ucudnn.measurement import Measurement as Measurement
from ucudnn.measurement import MeasurementKey as MeasurementKey
from ucudnn.measurement import Role as Role
from ucudnn.measurement import Software as Software
from ucudnn.measurement import Subject as Subject
from ucudnn.outcomes import Comparison as Comparison
from ucudnn.outcomes import Compilation as Compilation
from ucudnn.outcomes import Foresight as Foresight
from ucudnn.outcomes import LayoutRace as LayoutRace
from ucudnn.outcomes import Origin as Origin
from ucudnn.outcomes import StepMemory as StepMemory
from ucudnn.outcomes import StepRace as StepRace
from ucudnn.outcomes import Way as Way
from ucudnn.plan import KernelPlan as KernelPlan
from ucudnn.plan import Timing as Timing
from ucudnn.segment import MicroBatch as MicroBatch
from ucudnn.segment import Segment as Segment
from ucudnn.segment import SlabRows as SlabRows
from ucudnn.segment import StepDivision as StepDivision
from ucudnn.split import Chunk as Chunk
from ucudnn.timeline import Block as Block
