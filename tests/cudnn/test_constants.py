"""Every number of cuDNN's that is used, held against the headers of the releases tested."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from ucudnn.backends.cudnn import constants

NAMES = {
    constants.DescriptorKind: "CUDNN_BACKEND_{}_DESCRIPTOR",
    constants.Type: "CUDNN_TYPE_{}",
    constants.Attribute: "CUDNN_ATTR_{}",
    constants.DataType: "CUDNN_DATA_{}",
    constants.ConvolutionMode: "CUDNN_{}",
    constants.PointwiseMode: "CUDNN_POINTWISE_{}",
    constants.HeuristicMode: "CUDNN_HEUR_MODE_{}",
    constants.NumericalNote: "CUDNN_NUMERICAL_NOTE_{}",
    constants.BehaviorNote: "CUDNN_BEHAVIOR_NOTE_{}",
}
VALUE = re.compile(r"\b(CUDNN_\w+)(?:\s+CUDNN_DEPRECATED_ENUM)?\s*=\s*(\d+)")


@pytest.fixture(scope="module")
def header(library: Path) -> dict[str, int]:
    """Names and values of the C header beside a libcudnn."""
    text = (library.parents[1] / "include/cudnn_graph.h").read_text()
    return {name: int(value) for name, value in VALUE.findall(text)}


@pytest.mark.parametrize("numbers", NAMES, ids=lambda numbers: numbers.__name__)
def test_numbers_are_those_of_the_header(header, numbers):
    ours = {NAMES[numbers].format(member.name): int(member) for member in numbers}
    assert ours == {name: header.get(name) for name in ours}


def test_there_are_no_more_notes_and_knobs(header):
    assert len(constants.NumericalNote) == header["CUDNN_NUMERICAL_NOTE_TYPE_COUNT"]
    assert header["CUDNN_KNOB_TYPE_COUNTS"] <= constants.KNOB_TYPES


def test_every_kind_of_constant_is_tested():
    defined = {
        value
        for value in vars(constants).values()
        if isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum
    }
    assert defined == set(NAMES)
