"""Run many mutations of files in one process: what came of them, what broke, what memory it took.

    python tests/fuzz/harness.py plan_files 10000 0

A module beside this one has `Trials(folder)`, called with a source of chance: it mutates a file,
uses what can be read of it, and returns a word for what happened and the error's sentence, if any.
Whatever it raises is a finding.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

MOST_REPORTED = 5
# Plans are signed as in other tests.
sys.path.append(str(Path(__file__).parents[1] / "pure"))
IN_MEMORY = Path("/dev/shm")  # nothing here must survive a crash, and a disk would be waited for
LONGEST_SENTENCE = 1000  # what a file says may be far longer


def peak_bytes() -> int:
    """The most memory that this program had, unlike ru_maxrss without that of its parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def run(name: str, count: int, seed: int) -> dict[str, object]:
    """What `count` mutations led to."""
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        trial = importlib.import_module(name).Trials(Path(folder))
        for index in range(count):
            try:
                outcome, sentence = trial(random.Random(f"{seed} {index}"))
                assert len(sentence) < LONGEST_SENTENCE, sentence[:LONGEST_SENTENCE]
                outcomes[outcome] += 1
            except Exception:  # noqa: BLE001 - which is what is looked for
                what = traceback.format_exc()[-1500:]
                findings.append(f"mutation {index} of seed {seed}: {what}")
    return {
        "outcomes": outcomes,
        "findings": len(findings),
        "first": findings[:MOST_REPORTED],
        "peak_bytes": peak_bytes(),
        "torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    # a number that overflows on its way is a finding, too
    warnings.simplefilter("error")
    module, mutations, start = sys.argv[1:]
    sys.stdout.write(json.dumps(run(module, int(mutations), int(start)), indent=1) + "\n")
