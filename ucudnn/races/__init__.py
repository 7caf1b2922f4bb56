"""Outcomes of whole steps: races of a plan and of layouts, and the memory of a step."""

from __future__ import annotations

from ucudnn.races.compilation import Compilation as Compilation
from ucudnn.races.layout import MEMORY_FORMATS as MEMORY_FORMATS
from ucudnn.races.layout import Contestant as Contestant
from ucudnn.races.layout import LayoutHint as LayoutHint
from ucudnn.races.layout import LayoutRace as LayoutRace
from ucudnn.races.memory import StepMemory as StepMemory
from ucudnn.races.step import LEAST_ROUNDS as LEAST_ROUNDS
from ucudnn.races.step import TOLERATED as TOLERATED
from ucudnn.races.step import StepRace as StepRace
from ucudnn.races.step import StepTimes as StepTimes
