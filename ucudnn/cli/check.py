"""`ucudnn check` and `ucudnn compare`: check a plan on this machine, or against another plan."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ucudnn.cli.console import SAYS_NO, bar, out, say
from ucudnn.cli.options import JsonOption
from ucudnn.plan import Plan

# By `Finding.is_true`, which is None for what was not looked at.
_WORDS = {True: "ok", False: "NO", None: "skipped"}


def check(
    plan: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    canaries: Annotated[
        int,
        typer.Option(
            help="So many kernels are timed again, those that save most.", metavar="COUNT"
        ),
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Check whether a plan still holds on this machine; exit status 1 if not.

    Example: ucudnn check resnet18.plan.json
    """
    loaded = Plan.load(plan)
    # It imports torch, for which a wrong path need not wait.
    from ucudnn.check import check as check_plan

    # One finding each for device, versions, conditions and build, then the canaries. That on
    # determinism, which few plans have, takes no time of its own.
    numbers = itertools.count(1)
    with bar("checking") as update:
        findings = check_plan(loaded, canaries, lambda _: update(next(numbers), 4 + canaries))
    # What was not looked at is no reason to say no.
    is_true = all(finding.is_true is not False for finding in findings)
    if as_json:
        document = {"is_true": is_true, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(document))
    else:
        for finding in findings:
            say(f"{_WORDS[finding.is_true]:>7}  {finding.about}: {finding.said}")
        say("The plan is valid here." if is_true else "The plan is not valid here any more.")
    sys.exit(0 if is_true else SAYS_NO)


def compare(
    one: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    other: Annotated[Path, typer.Argument(help="Another one.", metavar="PLAN")],
    as_json: JsonOption = False,
) -> None:
    """Print the differences of two plans, kernel by kernel; exit status 1 if they differ.

    Example: ucudnn compare before.plan.json after.plan.json
    """
    from ucudnn.reports.comparison import compare as compare_plans
    from ucudnn.reports.text import comparison_summary, comparison_table

    found = compare_plans(Plan.load(one), Plan.load(other))
    names = (str(one), str(other))
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        for difference in found.differences:
            say(f"{difference.name}: {difference.one} | {difference.other}")
        if found.changed:
            out.print(comparison_table(found, names))
        for sentence in comparison_summary(found, names):
            say(sentence)
    sys.exit(0 if found.is_same else SAYS_NO)
