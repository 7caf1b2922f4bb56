"""Write the tables of README.md and of pages in docs anew from the results of benchmarks.

    python docs/make_tables.py README.md docs/results.md docs/memory.md docs/reference.md

A table stands between the lines `<!-- table NAME -->` and `<!-- end of table -->`. Reads
benchmarks/results and the table of settings; what stands elsewhere in the page stays.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from make_steps import NAME_BY_NETWORK

from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.config import SETTINGS
from ucudnn.distributed.exchange_advice import HARM, PERIOD
from ucudnn.problem import OPS
from ucudnn.units import format_bytes, format_ns

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from communication import chosen
from found_limits import layers_table, steps_table, time_text
from found_steps import Found
from peers import computes_other, plan_within

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# The machine of each file of results; of the others it is the Intel Xeon.
MACHINES = dict.fromkeys(
    (
        *("tuning_time.json", "tuning_haste.json", "fit_the_step.json", "communication.json"),
        *("fit_one.json", "fit_one_avx2.json", "algorithms.json", "algorithms_avx2.json"),
        *("peers.json", "peers_compiled.json"),
    ),
    "amd-epyc",
)
NAMES = {
    **NAME_BY_NETWORK,
    "vgg11": "VGG-11, N=8",
    "efficientnet": "EfficientNet-B0, N=8",
    "cifar10": "Caffe's CIFAR-10 network, N=1024",
}
# Without the batch, for tables that have the shape of the input.
SHORT_NAMES = {network: name.split(",")[0] for network, name in NAMES.items()}
TABLE = re.compile(r"(?<=<!-- table (\w{4}) -->\n\n).*?(?=\n\n<!-- end of table -->)", re.DOTALL)
Row = list[str]


def ratio(values: Iterable[float]) -> str:
    """A median with its interval."""
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def inverse(values: Iterable[float]) -> tuple[float, float, float]:
    """A ratio and its interval the other way round: the small numbers are good."""
    middle, low, high = values
    return 1 / middle, 1 / high, 1 / low


def results(name: str) -> Any:
    """The values of a file of results."""
    return json.loads((RESULTS / MACHINES.get(name, "intel-xeon") / name).read_text())


def tuned() -> list[Row]:
    """Training steps by plan, from tuning_time.json; the largest gain first."""
    heading = [
        "network",
        "torch's step",
        "tuned in",
        "kernels changed",
        "the plan's step over torch's (95 %)",
        "the plan's over the faster layout of torch",
        "saved in the layers that the plan changes",
        "peak memory of tuning over a step's",
    ]
    found = results("tuning_time.json")
    found.sort(key=lambda one: -one["speed_up"][0])
    return [heading, *map(tuned_row, found)]


def tuned_name(one: dict[str, Any]) -> str:
    """A network of tuning_time.json, with its workspace limit."""
    limit = f", within {one['limit'].replace('MiB', ' MiB')}" if one["limit"] else ""
    return NAMES[one["network"]] + limit


def tuned_row(one: dict[str, Any]) -> Row:
    """A network of tuning_time.json."""
    samples = sorted(one["samples_ns"]["torch"])
    return [
        tuned_name(one),
        f"{samples[len(samples) // 2] / 1e6:.0f} ms",
        f"{one['seconds']:.0f} s",
        f"{one['changed']} of {one['kernels']}",
        ratio(inverse(one["speed_up"])),
        ratio(inverse(one["speed_up_over_fastest"])),
        saved(one, "plan"),
        f"{one['peak_of_tuning_bytes'] / one['peak_of_steps_bytes']:.2f}",
    ]


def saved(one: dict[str, Any], who: str) -> str:
    """What a plan saves in the layers of a step, with the least and the most of the rounds."""
    return "{} ms ({} to {})".format(*map(round, one["saved_ms"][who]))


def hasty() -> list[Row]:
    """Plans that were tuned within some seconds beside thorough ones, from tuning_haste.json."""
    heading = [
        "network",
        "budget",
        "tuned in",
        "thorough plan tuned in",
        "the plan's step over torch's (95 %)",
        "the plan's step over the thorough plan's",
        "saved in the layers by the plan",
        "by the thorough one",
    ]
    return [heading, *map(hasty_row, results("tuning_haste.json"))]


def hasty_row(one: dict[str, Any]) -> Row:
    """A network of tuning_haste.json."""
    seconds = (f"{one[name]:.0f} s" for name in ("budget_s", "seconds", "thorough_seconds"))
    steps = (ratio(inverse(one[name])) for name in ("speed_up", "thorough_over_plan"))
    return [tuned_name(one), *seconds, *steps, saved(one, "plan"), saved(one, "thorough")]


def founds(name: str) -> list[Found]:
    """The entries of a file of whole_steps.py, the largest gain first."""
    return sorted(map(Found, results(name)), key=lambda one: over(one)[0])


def over(one: Found) -> tuple[float, float, float]:
    """The plan's time over that of the fastest way without one, as malloc comes."""
    return one.ratio(with_malloc=False)


def stepped(mode: str) -> list[Row]:
    """Steps by all ways, from whole_steps.json; the largest gain first."""
    found = [one for one in founds("whole_steps.json") if one.values["mode"] == mode]
    names = list(dict.fromkeys(way.name for one in found for way in one.own))
    heading = ["network", *names, "fastest with over fastest without a plan (95 %)", "peak"]
    return [heading, *(stepped_row(one, names) for one in found)]


def stepped_row(one: Found, names: list[str]) -> Row:
    """A network of whole_steps.json."""
    taken = {way.name: way.steps for way in one.own if way.steps.samples_ns}
    times = [f"{taken[name].time_ns / 1e6:.0f} ms" if name in taken else "-" for name in names]
    return [NAMES[one.values["network"]], *times, ratio(over(one)), peaks(one)]


def peaks(one: Found) -> str:
    """Peaks of a step by the fastest way without a plan, and by the fastest with one."""
    fastest = (one.fastest(on, with_malloc=False) for on in (False, True))
    return ", ".join(format_bytes(way.steps.peak_bytes) if way else "-" for way in fastest)


def made() -> list[Row]:
    """Steps of `make bench`, from bench.json; the largest gain first."""
    found = founds("bench.json")
    names = list(dict.fromkeys(way.name for one in found for way in one.ways))
    heading = ["network", "input", "mode", "fastest with over fastest without a plan (95 %)"]
    heading += ["the same, out of the ways with `+malloc`, too", *names]
    heading += ["peak: fastest without, with a plan", "tuned in", "kernels changed"]
    return [heading, *(made_row(one, names) for one in found)]


def made_row(one: Found, names: list[str]) -> Row:
    """A network of bench.json."""
    values = one.values
    taken = {way.name: time_text(way.steps.samples_ns) for way in one.ways}
    return [
        SHORT_NAMES[values["network"]],
        "x".join(map(str, values["input"])),
        values["mode"],
        ratio(over(one)),
        ratio(one.ratio()),
        *(taken.get(name, "-") for name in names),
        peaks(one),
        f"{one.followed['tuned_s']:.0f} s",
        f"{one.followed['changed']} of {one.followed['kernels']}",
    ]


def gained() -> list[Row]:
    """The networks of whole_steps.json whose plan is faster or slower beyond the noise.

    The others are one row between them.
    """
    heading = ["network", "mode", "fastest without a plan", "by the plan", "ratio (95 %)"]
    found = founds("whole_steps.json")
    faster = [one for one in found if over(one)[2] < 1]
    slower = [one for one in found if over(one)[1] > 1]
    rest = [over(one)[0] for one in found if one not in (*faster, *slower)]
    middle = [f"{len(rest)} others", "", "", "", f"{min(rest):.2f} to {max(rest):.2f}: noise"]
    return [heading, *map(gained_row, faster), middle, *map(gained_row, slower)]


def gained_row(one: Found) -> Row:
    """A network of the table of README.md."""
    fastest = (one.fastest(on, with_malloc=False) for on in (False, True))
    times = [f"{way.name}: {way.steps.time_ns / 1e6:.0f} ms" for way in fastest if way]
    return [NAMES[one.values["network"]], one.values["mode"], *times, ratio(over(one))]


# Networks of benchmarks/fit_the_step.py, in the order of the table.
FITTED = {
    "convnext": "ConvNeXt-T, N=16, 224x224",
    "segresnet": "SegResNet, N=4, 64x64x64",
    "denoiser": "diffusion U-Net, N=8, 64x64",
    "hifigan": "HiFi-GAN, N=8",
    "wav2vec2": "wav2vec 2.0, N=12",
    "resnet50": "ResNet-50, N=32, 224x224",
    "unet3d": "3-D U-Net, N=2, 64x64x64",
    "unet3d-batchnorm": "3-D U-Net with BatchNorm, N=2, 64x64x64",
    "resnet50-inference": "ResNet-50, inference, N=32, 224x224",
}


# Those of one image or volume, which plans divide into slabs.
FITTED_ONE = {
    "superres": "super-resolution, 384x384",
    "superres-512": "super-resolution, 512x512",
    "convnext-one": "ConvNeXt-T, 1024x1024",
    "resnet50-frozen": "ResNet-50 with frozen norms, 800x1333",
    "unet3d-one": "3-D U-Net with InstanceNorm, 96x96x96",
    "unet3d-inference": "inference: 3-D U-Net with BatchNorm, 160x160x160",
    "vae-decode": "inference: decoder of AutoencoderKL, 128x128 latent",
}


def times_over(way: dict[str, Any], other: dict[str, Any]) -> str:
    """The time of one way to run a step over that of another.

    A way that no round has reached was timed once, after a step by torch.
    """
    if not way["samples_ns"]:
        torchs, own = way["beside_torch_ns"]
        return ratio((own / torchs,) * 3)
    return ratio(ratio_interval(way["samples_ns"], other["samples_ns"]))


def fitted(file: str, names: dict[str, str]) -> list[Row]:
    """Steps within less memory, from a file of benchmarks/fit_the_step.py."""
    found = {one["network"]: one["ways"] for one in results(file)}
    times = ["time over torch's (95 %)", "time over torch.compile's (95 %)"]
    rows = [["network", "step by", "peak", "of torch's", *times, "deviation"]]
    for network, name in names.items():
        ways = found.get(network, {})
        compiled = ways.get("torch.compile, activation budget 0.5")
        for title, way in ways.items():
            torchs = next(iter(ways.values()))
            share = way["peak_bytes"] / torchs["peak_bytes"]
            beside = compiled if title.startswith(("segments", "loop")) else None
            rows.append(
                [
                    name if way is torchs else "",
                    title,
                    format_bytes(way["peak_bytes"]),
                    f"{share:.0%}",
                    "1" if way is torchs else times_over(way, torchs),
                    times_over(way, beside) if beside else "",
                    f"{way['deviation']:.0e}",
                ]
            )
    # Without a time over torch.compile's, the table has no such column.
    return rows if any(row[5] for row in rows[1:]) else [[*row[:5], row[6]] for row in rows]


def rivals() -> list[Row]:
    """Every way to need less memory, and plans within the peaks of the best, from peers.json."""
    heading = [
        "network",
        "step by",
        "peak, of eager's",
        "time over eager's",
        "expected before",
        "nodes of its graph",
        "a plan within its peak: peak",
        "time over eager's (95 %)",
        "time over this way's (95 %)",
    ]
    rows = [heading]
    for one in results("peers.json"):
        names = iter([FITTED[one["network"]]])
        for title, way in one["ways"].items():
            name = title + ": other gradients" * computes_other(way, one["ways"]["eager"])
            rows.append([next(names, ""), name, *rival(one, title), *meeting(one, title)])
    return rows


# What plans that meet no way of their own peak are called.
PLANS = {
    "plan": "no memory budget",
    **{f"plan within {share}": f"within {share}" for share in ("45%", "60%")},
}


def compiled(name: str) -> list[Row]:
    """Plans that may compile, beside torch.compile at its best, from a file of peers.py."""
    heading = [
        "network",
        "plan",
        "how it compiles",
        "peak, of eager's",
        "time over eager's (95 %)",
        "beside",
        "its peak",
        "time over its (95 %)",
    ]
    rows = [heading]
    for one in results(name):
        names, peaks = iter([FITTED[one["network"]]]), one["race"]
        eager = peaks["eager"]["peak_bytes"]
        for title, plan in one["plans"].items():
            racing = plan_within(title)
            if racing not in peaks:
                continue
            other = title if title in one["front"] else one["front"][0]
            rows.append(
                [
                    *(next(names, ""), "within its peak" if title == other else PLANS[title]),
                    compiled_as_told(plan),
                    f"{peaks[racing]['peak_bytes'] / eager:.0%}",
                    *(ratio(raced(one, racing, "eager")), other),
                    f"{peaks[other]['peak_bytes'] / eager:.0%}",
                    ratio(raced(one, racing, other)),
                ]
            )
    return rows


def compiled_as_told(plan: dict[str, Any]) -> str:
    """How a plan has the model compiled, and what it divides."""
    share, count = plan["compiled"], len(plan["divided"])
    parts = ["no"] if share is None else [f"{share:.0%} of the activations" if share < 1 else "yes"]
    parts += [f"{count} segment{'s' * (count > 1)}"] * bool(count)
    parts += ["channels_last"] * ("channels_last" in (plan["layout"], plan["memory_format"]))
    return ", ".join(parts)


def rival(one: dict[str, Any], title: str) -> Row:
    """A way of a network of peers.json: what it takes, what was expected, and its graphs."""
    row, torchs = one["ways"][title], one["ways"]["eager"]
    share = torchs["peak_bytes"] / 100
    expected = row["predicted"]
    if title in one["race"]:
        time = ratio(raced(one, title, "eager"))
    else:
        time = f"{median_ns(row['step_ns']) / median_ns(torchs['step_ns']):.2f}"
    return [
        f"{row['peak_bytes'] / share:.0f}%",
        "1" if row is torchs else time,
        f"{expected['peak_bytes'] / share:.0f}%, {expected['ratio']:.2f}",
        ", ".join(map(str, row["graphs"])),
    ]


def meeting(one: dict[str, Any], title: str) -> Row:
    """The plan within the peak of a way of peers.json, beside it."""
    plan = plan_within(title)
    if "refused" in one["plans"].get(title, {}):
        return ["refused", "", ""]
    if plan not in one["race"]:
        return ["", "", ""]
    share = one["race"][plan]["peak_bytes"] / one["ways"]["eager"]["peak_bytes"]
    return [f"{share:.0%}", *(ratio(raced(one, plan, other)) for other in ("eager", title))]


def raced(one: dict[str, Any], title: str, other: str) -> tuple[float, float, float]:
    """The time of one way of a race of peers.json over that of another."""
    samples = (one["race"][name]["samples_ns"] for name in (title, other))
    return ratio_interval(*samples)


# How benchmarks/communication.py names the links.
LINK_NAMES = {
    "loopback": "none: loopback",
    "5ms,100GB/s": "5 ms",
    "1ms,200Mbit/s": "1 ms, 200 Mbit/s",
    "0.1ms,1Gbit/s": "0.1 ms, 1 Gbit/s",
}


def linked() -> list[Row]:
    """Advised ways to exchange gradients beside the fastest ones, from communication.json."""
    heading = [
        "link",
        "ranks",
        "network",
        "torch's step",
        "predicted",
        "advised",
        "times as fast as torch's",
        "fastest of the same training",
        "times as fast as torch's",
        "averages, times as fast as torch's",
    ]
    rows = [heading]
    for cell in results("communication.json")["cells"]:
        own = cell["ways"][0]
        times = {way["name"]: median_ns(way["samples_ns"]) for way in cell["ways"]}
        advised = chosen(cell)
        others = [way["name"] for way in cell["ways"] if HARM[way["harm"]] != "other training"]
        fastest = min(others, key=times.__getitem__)
        torchs = times[own["name"]]
        rows.append(
            [
                LINK_NAMES[cell["link"]],
                str(cell["ranks"]),
                cell["network"],
                format_ns(torchs),
                f"{own['predicted_ns'] / own['measured_ns'] - 1:+.1%}",
                advised,
                f"{torchs / times[advised]:.2f}",
                fastest,
                f"{torchs / times[fastest]:.2f}",
                f"{torchs / times[f'average parameters every {PERIOD} steps']:.2f}",
            ]
        )
    return rows


def halved() -> list[Row]:
    """Kernels in bfloat16 by onednn_float32 on an imitated processor, by convolution and layout."""
    cells: dict[tuple[str, str], Row] = {}
    for one in results("algorithms_avx2.json")["kernels"]:
        low, middle, high = one["ratios"]["onednn_float32"]
        layout = "channels_last" if "nhwc" in one["kernel"] else "default"
        cells.setdefault((one["of"], layout), []).append(ratio((middle, low, high)))
    heading = ["convolution", "layout", *OPS]
    return [heading, *([*key, *row] for key, row in cells.items())]


def special() -> list[Row]:
    """Kernels of networks by the two algorithms that are made for them, beside the best other."""
    rows = []
    for one in results("algorithms.json")["kernels"]:
        ratios = {"torch_default": [1.0, 1.0, 1.0], **one["ratios"]}
        name = "phases" if one["kernel"].startswith("dgrad") else "diagonal_gemm"
        low, middle, high = ratios.pop(name, (0.0, 0.0, 0.0))
        other = min(ratios, key=lambda rival: ratios[rival][1])
        own = ratio((middle, low, high)) if middle else "over 6"
        best = f"`{other}`" if other == "torch_default" else f"`{other}` {ratios[other][1]:.2f}"
        rows.append([one["of"], f"`{one['kernel']}`", f"`{name}`", own, best])
    heading = ["network", "kernel", "algorithm", "time over torch's", "best other"]
    return [heading, *rows]


def settings() -> list[Row]:
    """The settings, as `ucudnn.config` has them."""
    rows = []
    for name, one in SETTINGS.items():
        default = ", ".join(one.default) if isinstance(one.default, tuple) else one.default
        more = f" ([more]({one.page}))" if one.page else ""
        shown = "" if default is None else f"`{str(default).lower()}`"
        rows.append([f"`{name}`", shown, f"{one.meaning}{more}"])
    return [["setting", "default", "meaning"], *rows]


TABLES: dict[str, Callable[[], list[Row]]] = {
    "sets": settings,
    "plan": tuned,
    "step": lambda: stepped("training"),
    "pass": lambda: stepped("inference"),
    "make": made,
    "gain": gained,
    "caps": lambda: steps_table(results("limits.json"), SHORT_NAMES),
    "hast": hasty,
    "deep": lambda: layers_table(results("limits_layers.json")),
    "fits": lambda: fitted("fit_the_step.json", FITTED),
    "ones": lambda: fitted("fit_one.json", FITTED_ONE),
    "avx2": lambda: fitted("fit_one_avx2.json", FITTED_ONE),
    "peer": rivals,
    "comp": lambda: compiled("peers_compiled.json"),
    "xeon": lambda: compiled("peers_compiled_xeon.json"),
    "link": linked,
    "half": halved,
    "algo": special,
}
# Where the file of a table says how it was made, a sentence below the table does, too.
FILES = {
    "plan": "tuning_time.json",
    "hast": "tuning_haste.json",
    "make": "bench.json",
    "caps": "limits.json",
    "deep": "limits_layers.json",
    "fits": "fit_the_step.json",
    "ones": "fit_one.json",
    "avx2": "fit_one_avx2.json",
    "peer": "peers.json",
    "comp": "peers_compiled.json",
    "xeon": "peers_compiled_xeon.json",
    "link": "communication.json",
}
# Some benchmarks need a quiet machine for an hour, and are run after their table was designed.
MISSING = "Not measured yet."


def origin(name: str) -> str:
    """How a file of results was made, in a sentence."""
    found = results(name)
    entries = found if isinstance(found, list) else [found]
    runs = [one["made"] for one in entries]
    device, threads, torch = (
        ", ".join(dict.fromkeys(str(run[key]) for run in runs))
        for key in ("device", "threads", "torch")
    )
    commands = " and ".join(dict.fromkeys(f"`{run['command']}`" for run in runs))
    days = " and ".join(sorted({run["date"][:10] for run in runs}))
    loads = sorted(run["load"] for run in runs)
    minutes = sum(one["wall_s"] for one in entries) / 60
    return (
        f"Measured on {days} in {minutes:.0f} minutes by {commands}: {device}, {threads} threads, "
        f"torch {torch}. Just before, other processes used up to {loads[-1]} processors."
    )


def rewritten(page: str) -> str:
    """The page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        try:
            heading, *rows = TABLES[match.group(1)]()
        except FileNotFoundError:
            return MISSING
        lines = [heading, ["---"] * len(heading), *rows]
        text = "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in lines)
        file = FILES.get(match.group(1))
        return f"{text}\n\n{origin(file)}" if file else text

    return TABLE.sub(table, page)


def main(*paths: str) -> None:
    """Write the tables of pages anew."""
    for page in map(Path, paths):
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
