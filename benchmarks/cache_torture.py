"""Try to make the measurement cache lose, double or falsify an entry, and print the counts.

    python benchmarks/cache_torture.py [--fraction 0.05] [--seed 0] [--only kill,corrupt]

Kills writers, runs many at once, damages files, fills and forbids the disk, and times look-ups.
Exit status 1 where anything was lost, doubled or wrong. Times are printed and never judged.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import h5py
import numpy as np

from ucudnn import cache as caches
from ucudnn.cache import CacheWarning, store
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.problem import Problem

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cache"))
from laws import refuse, sample_measurements

DEVICE = Device("cpu", "torture")
SOFTWARE = Software("2.13.0", cudnn="9.28.0")
KILL_WITHIN_S = 0.2
KILLS_PER_CHECK = 20
TRIALS_PER_CHILD = 250
TRIAL_LIMIT_S = 120
OPENINGS = 7
MIB = 1 << 20


def key(writer: int, number: int) -> MeasurementKey:
    problem = Problem("fprop", number + 1, 4, 4, (9,), (3,))
    return MeasurementKey(problem, f"writer{writer}", DEVICE, SOFTWARE, Conditions(), 1)


def measurement(writer: int, number: int) -> Measurement:
    """The one true measurement of a key: any other number would be a wrong one."""
    time_ns = writer * 1_000_000 + number + 1
    return Measurement(key(writer, number), "ok", time_ns, samples=(time_ns, time_ns + 1))


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked process; its number, to wait for."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect(counts: Counter[str], name: str, found: int, wanted: int) -> None:
    counts[name] = found
    if found != wanted:
        counts["failures"] += 1
        print(f"  FAILED: {name} is {found}, not {wanted}")


# 1. Writers killed at random moments


def writer_until_killed(root: Path, writer: int, acknowledge: int, locks: bool) -> None:
    """Put, and say so, until killed; each cache is closed now and then, so it compacts."""
    # Without locks as on a file system that has none.
    if not locks:
        store.FileLock.acquire = refuse
    number = 0
    while True:
        with caches.open(root) as cache:
            for _ in range(5):
                cache.put([measurement(writer, number), measurement(writer, number + 1)])
                number += 2
                os.write(acknowledge, number.to_bytes(4, "little"))


def kill(fraction: float, chance: random.Random, counts: Counter[str]) -> None:
    kills = max(1, round(1000 * fraction))
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        acknowledged: dict[int, int] = {}
        for writer in range(kills):
            acknowledged[writer] = kill_one(Path(folder), writer, chance.uniform(0, KILL_WITHIN_S))
            if writer % KILLS_PER_CHECK == KILLS_PER_CHECK - 1:
                # Closing it also makes one file of what the dead left, as any later user would.
                with caches.open(folder) as cache:
                    lost += count_lost(cache, acknowledged)
        with caches.open(folder) as cache:
            lost += count_lost(cache, acknowledged)
            wrong = sum(one != true_measurement(one.key) for one in cache)
            clean = cache.check().clean
        expect(counts, "writers killed", kills, kills)
        expect(counts, "measurements acknowledged", *[sum(acknowledged.values())] * 2)
        expect(counts, "lost", lost, 0)
        expect(counts, "wrong", wrong, 0)
        expect(counts, "check is clean", clean, 1)


def kill_one(folder: Path, writer: int, after_s: float) -> int:
    """Kill a writer after some time; how many of its measurements it had acknowledged."""
    source, target = os.pipe()
    child = in_child(lambda: writer_until_killed(folder, writer, target, writer % 2 == 0))
    os.close(target)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    exit_status(child)
    with os.fdopen(source, "rb") as stream:
        return int.from_bytes(stream.read()[-4:], "little")


def count_lost(cache: caches.AbstractCache, acknowledged: dict[int, int]) -> int:
    return sum(
        cache.get(key(writer, number)) != measurement(writer, number)
        for writer, count in acknowledged.items()
        for number in range(count)
    )


def true_measurement(of: MeasurementKey) -> Measurement:
    return measurement(int(of.algorithm.removeprefix("writer")), of.problem.batch - 1)


# 2. Many writers at once


def crowd(fraction: float, _: random.Random, counts: Counter[str]) -> None:
    writers, puts = 16, max(1, round(1000 * fraction))
    for locks in (True, False):
        with tempfile.TemporaryDirectory() as folder:

            def work(writer: int, locks: bool = locks, folder: str = folder) -> None:
                if not locks:
                    store.FileLock.acquire = refuse
                with caches.open(folder) as cache:
                    for number in range(puts):
                        cache.put([measurement(writer, number)])

            start = time.perf_counter()
            children = [in_child(lambda w=w: work(w)) for w in range(writers)]
            crashed = sum(exit_status(child) != 0 for child in children)
            seconds = time.perf_counter() - start
            with caches.open(folder) as cache:
                everything = list(cache)
                clean = cache.check().clean
            label = f"{'with' if locks else 'without'} locks"
            missing = {key(w, n) for w in range(writers) for n in range(puts)}
            missing -= {one.key for one in everything}
            wrong = sum(one != true_measurement(one.key) for one in everything)
            print(f"  {label}: {writers} writers, {puts} puts each: {seconds:.1f} s")
            expect(counts, f"crashed {label}", crashed, 0)
            expect(counts, f"kept {label}", len(everything), writers * puts)
            expect(counts, f"missing {label}", len(missing), 0)
            expect(counts, f"wrong {label}", wrong, 0)
            expect(counts, f"check is clean {label}", clean, 1)


# 3. Damage


def flip_bit(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def zero_page(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    size = chance.choice((256, 4096))
    start = chance.randrange(0, len(data), 256)
    data[start : start + size] = bytes(len(data[start : start + size]))
    path.write_bytes(data)


def scramble(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    data[start : start + 64] = chance.randbytes(len(data[start : start + 64]))
    path.write_bytes(data)


def append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as stream:
        stream.write(chance.randbytes(chance.randrange(1, 600)))


def foreign(path: Path, _: random.Random) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file["measurements"] = np.arange(10)


def folder_instead(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def symlink_loop(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = (flip_bit, truncate, zero_page, scramble, append, foreign)
RARE_DAMAGES = (folder_instead, symlink_loop, pipe)


def sample_cache(root: Path) -> dict[str, set[str]]:
    """Three segments; what each holds, as text."""
    held: dict[str, set[str]] = {}
    groups = [sample_measurements(3000, seed)[1::100] for seed in range(3)]
    groups = [
        [replace(one, key=replace(one.key, device=DEVICE, protocol=seed)) for one in group]
        for seed, group in enumerate(groups)
    ]
    cache = caches.open(root)
    for group in groups:
        before = set(root.glob("*.d/*.h5"))
        cache.put(group)
        (segment,) = set(root.glob("*.d/*.h5")) - before
        held[str(segment.relative_to(root))] = set(map(repr, group))
    return held


def damage_once(root: Path, held: dict[str, set[str]], trial: int, seed: int) -> str:
    """Damage one file of a cache and read it; what went wrong, "" for nothing."""
    chance = random.Random(seed * 1_000_003 + trial)
    victim = chance.choice(sorted(held))
    whole = (root / victim).read_bytes()
    damage = chance.choice(RARE_DAMAGES if trial % 20 == 0 else DAMAGES)
    damage(root / victim, chance)
    regular = stat.S_ISREG((root / victim).lstat().st_mode)
    harmless = regular and (root / victim).read_bytes() == whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with caches.open(root) as cache:
            found = set(map(repr, cache))
            cache.put([measurement(0, 0)])
            if cache.get(key(0, 0)) != measurement(0, 0):
                return f"{damage.__name__}: a put was not found"
            clean = cache.check().clean
    safe = set().union(*(texts for name, texts in held.items() if name != victim))
    everything = safe | held[victim]
    said = [one for one in caught if issubclass(one.category, CacheWarning)]
    aside = list(root.rglob("*.damaged-*"))
    problems = {
        "an entry of a sound file was lost": not safe <= found,
        "a wrong entry": not found <= everything,
        "entries of a file that is as it was were lost": harmless and found != everything,
        "not one warning": len(said) != (not harmless),
        "the warning names another file": bool(said) and victim not in str(said[0].message),
        "a file was set aside, or was not": len(aside) != (regular and not harmless),
        "check is not right": clean != regular,
    }
    return next((f"{damage.__name__}: {what}" for what, true in problems.items() if true), "")


def corrupt(fraction: float, chance: random.Random, counts: Counter[str]) -> None:
    trials, seed = max(1, round(10_000 * fraction)), chance.randrange(1 << 30)
    failures = crashed = 0
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template")
        held = sample_cache(template)

        def batch(first: int, last: int) -> None:
            signal.alarm(TRIAL_LIMIT_S)
            for trial in range(first, last):
                root = Path(folder, f"trial{trial}")
                shutil.copytree(template, root)
                problem = damage_once(root, held, trial, seed)
                if problem:
                    print(f"  trial {trial} (seed {seed}): {problem}", flush=True)
                    os._exit(2)
                shutil.rmtree(root)

        for first in range(0, trials, TRIALS_PER_CHILD):
            last = min(trials, first + TRIALS_PER_CHILD)
            status = exit_status(in_child(lambda f=first, n=last: batch(f, n)))
            failures += status == 2
            crashed += status not in (0, 2)
    expect(counts, "files damaged", trials, trials)
    expect(counts, "crashed or hung", crashed, 0)
    expect(counts, "failures of damage", failures, 0)


# 4. Disks that do not take it


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[bool]:
    """Mount something, where this process may."""
    done = subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def disk(fraction: float, _: random.Random, counts: Counter[str]) -> None:
    puts = max(60, round(1000 * fraction))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with mounted(folder, "-t", "tmpfs", "-o", "size=2m", "tmpfs") as works:
            if works:
                full(folder, puts, counts)
        image = folder / "image"
        with caches.open(image) as cache:
            cache.put([measurement(0, number) for number in range(10)])
        with mounted(image, "--bind", str(image)) as bound:
            if (
                bound
                and subprocess.run(
                    ["mount", "-o", "remount,ro,bind", str(image)], check=False, capture_output=True
                ).returncode
                == 0
            ):
                read_only(image, counts)
            else:
                print("  skipped: mounting needs CAP_SYS_ADMIN")


def full(folder: Path, puts: int, counts: Counter[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with caches.open(folder) as cache:
            filler = folder / "filler"
            for number in range(puts):
                if number == puts // 3:
                    with filler.open("wb") as stream:
                        fill(stream.fileno())
                if number == 2 * puts // 3:
                    filler.unlink()
                cache.put([measurement(0, number)])
                found = cache.get(key(0, number))
                counts["not found on a full disk"] += found != measurement(0, number)
    expect(counts, "not found on a full disk", counts["not found on a full disk"], 0)
    expect(counts, "warnings about a full disk", len(caught), 1)
    with caches.open(folder, "r") as cache:
        expect(counts, "kept when there was room again", len(cache), puts)
        expect(counts, "check is clean after a full disk", cache.check().clean, 1)


def fill(handle: int) -> None:
    for size in (4096, 1):
        try:
            while True:
                os.write(handle, bytes(size))
        except OSError:
            continue


def read_only(image: Path, counts: Counter[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with caches.open(image) as cache:
            for number in range(5, 20):
                cache.put([measurement(0, number)])
            expect(counts, "found on a read-only disk", len(cache), 20)
    expect(counts, "warnings about a read-only disk", len(caught), 1)


# 5. Times

# Imports are timed apart: a process that tunes has most of them already.
OPEN = """
import pickle, sys, time
start = time.perf_counter()
import ucudnn.cache.store
loaded = time.perf_counter()
found = ucudnn.cache.open(sys.argv[1], "r").get(pickle.loads(bytes.fromhex(sys.argv[2])))
print(loaded - start, time.perf_counter() - loaded)
assert found is not None
"""


def lookup(_: float, __: random.Random, counts: Counter[str]) -> None:
    for problems, name in ((5, "one tuning"), (334, "large")):
        keys = [
            MeasurementKey(problem, f"eng{a}_k2=20", DEVICE, SOFTWARE, Conditions(), 1)
            for problem in (
                Problem("fprop", 1 + p // 60, 4, 4 + p % 60, (56, 56), (3, 3))
                for p in range(problems)
            )
            for a in range(60)
        ]
        values = np.random.default_rng(0).integers(10**4, 10**7, (len(keys), 6)).tolist()
        with tempfile.TemporaryDirectory() as folder:
            with caches.open(folder) as cache:
                cache.put(
                    Measurement(one, "ok", v[0], v[1] % 999, tuple(v[1:]), v[2] << 10, v[3] * 1e-9)
                    for one, v in zip(keys, values, strict=True)
                )
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.h5"))
            print(f"  {name}: {len(keys)} measurements, {size / MIB:.2f} MiB")
            print_openings(folder, keys[0])
            cache = caches.open(folder, "r")
            found = [cache.get(one) for one in keys]
            right = sum(
                one is not None and (one.time_ns, *one.samples) == tuple(v)
                for one, v in zip(found, values, strict=True)
            )
            times_us = sorted(timed(cache, one) * 1e6 for one in keys)
            print(f"  a look-up: {times_us[len(keys) // 2]:.0f} us, at most {times_us[-1]:.0f} us")
            expect(counts, f"found of {name}", right, len(keys))


def print_openings(folder: str, first: MeasurementKey) -> None:
    words = [sys.executable, "-c", OPEN, folder, pickle.dumps(first).hex()]
    runs = [
        subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(OPENINGS)
    ]
    for what, column in (("imports", 0), ("open and first look-up", 1)):
        times_s = [float(run[column]) for run in runs]
        print(f"  {what}: at least {min(times_s):.3f} s, median {median(times_s):.3f} s")


def timed(cache: caches.AbstractCache, one: MeasurementKey) -> float:
    start = time.perf_counter()
    cache.get(one)
    return time.perf_counter() - start


# 6. Two versions side by side


def versions(_: float, __: random.Random, counts: Counter[str]) -> None:
    old = [measurement(0, number) for number in range(50)]
    newer = replace(SOFTWARE, cudnn="9.29.0")
    new = [replace(one, key=replace(one.key, software=newer), time_ns=5) for one in old]
    with tempfile.TemporaryDirectory() as folder:
        with caches.open(folder) as cache:
            cache.put(old)
        with caches.open(folder) as cache:
            hits = sum(cache.get(one.key) is not None for one in new)
            expect(counts, "hits after an upgrade", hits, 0)
            cache.put(new)
        with caches.open(folder) as cache:
            hits = sum(cache.get(one.key) == one for one in (*old, *new))
            expect(counts, "hits after a downgrade", hits, 100)
            expect(counts, "files for both", cache.info().files, 1)


PARTS = {
    "kill": kill,
    "crowd": crowd,
    "corrupt": corrupt,
    "disk": disk,
    "lookup": lookup,
    "versions": versions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fraction", type=float, default=1.0, help="of the full number of trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    failures = 0
    for name in options.only.split(","):
        counts: Counter[str] = Counter()
        print(f"{name} (seed {options.seed}, {options.fraction:.0%})")
        start = time.perf_counter()
        PARTS[name](options.fraction, random.Random(options.seed), counts)
        failures += counts.pop("failures", 0)
        for what, count in counts.items():
            print(f"  {what}: {count}")
        print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{failures} failures; at most {memory} MiB of memory")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
