"""Minutes of random calls from many threads over shared streams, every result checked, memory watched.

    python -m tests.soak --minutes 10 --threads 8 --streams 4 --json soak.json

Every thread draws calls of `jobs`'s jobs, several in flight at a time, on one of the shared streams, some with
inputs that another stream made. Half of the calls have fresh inputs and are compared with fp64, or with a CPU.
The other half repeat a call of the warm-up and must give the same bits. Every 20 seconds all threads meet with nothing
in flight: memory must then be as after the warm-up. Exit code 1 for any failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import subprocess
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import jitrope
from jitrope.jit import kernels
from jitrope.run import enqueue
from jitrope.run import launch as runtime

from .bits import digest
from .jobs import in_host_memory, pool

MIB = 1 << 20
MOST_IN_FLIGHT, MOST_EXCEPTIONS, MEETING_TIMEOUT = 6, 50, 300.0
# In place of 512 and 4096, so that threads drop known calls many times in ten minutes, and reach the most memory for
# them in the warm-up.
KEPT_CALLS, KEPT_LAUNCHES = 64, 512
# What memory may grow by. "device" is the process's whole memory: kernels first needed after the warm-up are loaded
# later. "allocated": constants of a few elements, made once; a call that kept 16 bytes would be found.
LIMITS = {"rss": 64 * MIB, "device": 16 * MIB, "allocated": 64 << 10}


class Soak:
    """Threads, their findings, and the meetings with nothing in flight."""

    def __init__(self, plan: argparse.Namespace) -> None:
        self.plan = plan
        self.jobs = pool(plan.cases, plan.seed)
        self.seeds = [random.Random(f"{plan.seed} {n}").getrandbits(32) for n in range(len(self.jobs))]
        self.on_gpu = plan.device.startswith("cuda")
        self.streams = [torch.cuda.Stream(plan.device) for _ in range(plan.streams)] if self.on_gpu else [None]
        self.kept: list[str | None] = [None] * len(self.jobs)  # the bits of each job's results
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(plan.threads + 1)
        self.meeting_is_due, self.stop = threading.Event(), threading.Event()
        self.calls, self.repeats = Counter[str](), Counter[str]()
        self.wrong: dict[str, list[str]] = {}  # of each job
        self.exceptions: list[str] = []
        self.meetings: list[dict[str, Any]] = []

    def work(self, number: int) -> None:
        torch.set_num_threads(1)
        draw = random.Random(f"{self.plan.seed} thread {number}")
        stream, order = self.streams[number % len(self.streams)], list(range(len(self.jobs)))
        draw.shuffle(order)
        try:
            with torch.cuda.stream(stream):
                for first in range(0, len(order), MOST_IN_FLIGHT):
                    if not self.stop.is_set():
                        self.burst([(n, True) for n in order[first : first + MOST_IN_FLIGHT]], draw, stream)
                while not self.stop.is_set():
                    if self.meeting_is_due.is_set():  # the first is due before the end of the warm-up
                        self.barrier.wait(MEETING_TIMEOUT)
                        self.barrier.wait(MEETING_TIMEOUT)  # memory is measured
                        continue
                    some = range(draw.randint(1, MOST_IN_FLIGHT))
                    self.burst([(draw.randrange(len(order)), draw.random() < 0.5) for _ in some], draw, stream)
        except threading.BrokenBarrierError:
            pass
        except Exception:
            self.failed("a thread", traceback.format_exc())
            self.barrier.abort()

    def burst(self, drawn: list[tuple[int, bool]], draw: random.Random, stream: Any) -> None:
        """Start all calls, then check all results."""
        flights = []
        for number, repeated in drawn:
            job, seed = self.jobs[number], self.seeds[number] if repeated else draw.getrandbits(32)
            side = draw.choice(self.streams) if draw.random() < 0.25 else stream
            try:
                with torch.cuda.stream(side):
                    call = job.make(self.plan.device, seed)
                if side is not stream:
                    stream.wait_stream(side)
                # A call holds its inputs, possibly of another stream, until its results are complete.
                flights.append((job, number, seed, repeated, call, call.start()))
            except Exception:
                self.failed(f"{job} seed {seed}", traceback.format_exc())
        for job, number, seed, repeated, call, outputs in flights:
            try:
                got = in_host_memory(outputs)
                with self.lock:
                    kept = self.kept[number] if repeated and job.repeatable else None
                    self.calls[job.op] += 1
                    self.repeats[job.op] += kept is not None
                if kept is None:
                    call.check(got)
                else:
                    assert digest(got) == kept, "has other bits than the first time"
                if repeated and kept is None:
                    with self.lock:
                        self.kept[number] = self.kept[number] or digest(got)
            except AssertionError as error:
                how = " ".join(str(error).split())[:400]
                with self.lock:
                    self.wrong.setdefault(str(job), []).append(f"seed {seed}: {how}")
            except Exception:
                self.failed(f"{job} seed {seed}", traceback.format_exc())

    def failed(self, where: str, text: str) -> None:
        with self.lock:
            self.exceptions.append(f"{where}: {text[-1500:]}")
            if len(self.exceptions) >= MOST_EXCEPTIONS:
                self.stop.set()
                self.barrier.abort()  # no thread waits for stopped ones

    def meeting(self, last: bool = False) -> dict[str, Any]:
        """Memory while nothing is in flight."""
        self.meeting_is_due.set()
        self.barrier.wait(MEETING_TIMEOUT)
        self.meeting_is_due.clear()
        try:
            gc.collect()
            if self.on_gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            with contextlib.suppress(AttributeError, OSError):  # glibc's
                ctypes.CDLL(None).malloc_trim(0)
            now = {"seconds": round(time.monotonic() - self.start, 1), "calls": sum(self.calls.values())}
            return {**now, "kernels": len(kernels._kernels), **memory(self.on_gpu)}
        finally:
            if last:
                self.stop.set()
            self.barrier.wait(MEETING_TIMEOUT)

    def run(self) -> dict[str, Any]:
        """The report. It is written to a file after every meeting, so an interrupted run leaves one."""
        self.start, seconds = time.monotonic(), 60 * self.plan.minutes  # of the whole run
        threads = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(self.plan.threads)]
        for thread in threads:
            thread.start()
        try:
            first = self.meeting()["seconds"]  # after a pass over all jobs
            due = first + 0.1 * max(0.0, seconds - first)
            while not self.stop.wait(0.2):
                now = time.monotonic() - self.start
                if now >= due:
                    last = now >= seconds and len(self.meetings) > 0  # compare memory with an earlier meeting's
                    self.meetings.append(self.meeting(last))
                    self.report()
                    due = min(now + self.plan.between_meetings, seconds)
        except threading.BrokenBarrierError:
            self.failed("the meeting", f"a thread did not come within {MEETING_TIMEOUT:.0f} s, or failed")
        except Exception:
            self.failed("the meeting", traceback.format_exc())
        self.stop.set()
        self.barrier.abort()  # end all waits
        for thread in threads:
            thread.join(10)
        return self.report()

    def report(self) -> dict[str, Any]:
        with self.lock:
            report = {
                **vars(self.plan), "json": str(self.plan.json), "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name() if self.on_gpu else None,
                "ops": {
                    op: {"calls": count, "against the CPU": count - self.repeats[op], "against bits": self.repeats[op]}
                    for op, count in sorted(self.calls.items())
                },
                "calls": sum(self.calls.values()), "kernels": len(kernels._kernels), "compiled": len(kernels.compiled),
                "wrong results": sum(map(len, self.wrong.values())),
                "wrong": [f"{len(each)} x {job}, first {each[0]}" for job, each in self.wrong.items()],
                "exceptions": len(self.exceptions), "failed": self.exceptions[:20],
                "meetings": self.meetings,
            }  # fmt: skip
        report["problems"] = problems(report)
        if self.plan.json is not None:
            self.plan.json.write_text(json.dumps(report, indent=1))
        return report


def memory(on_gpu: bool) -> dict[str, int]:
    """This process's bytes: resident ones, 0 without /proc; torch's; on the device, with kernels.

    The last are all used bytes if the driver does not list processes.
    """
    found = dict.fromkeys(("rss", "allocated", "reserved", "device"), 0)
    with contextlib.suppress(OSError):
        found["rss"] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        of_torch = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        found |= {**of_torch, "device": total - free}
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
            found["device"] = dict(map(int, line.split(",")) for line in told)[os.getpid()] * MIB
    return found


def problems(report: dict[str, Any]) -> list[str]:
    """The failures of a soak."""
    found = [f"{report[name]} {name}" for name in ("wrong results", "exceptions") if report[name]]
    first, *later = report["meetings"] or [dict.fromkeys(LIMITS, 0)]  # the first is after the warm-up
    if not later:
        found.append("too short: memory was measured less than twice after the warm-up")
    for name, limit in LIMITS.items():
        more = max((at[name] - first[name] for at in later), default=0)
        if more > limit:
            found.append(f"memory is not flat: {name} grew by {more / MIB:.2f} MiB, {limit / MIB:.2f} are allowed")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of the whole run, the warm-up included")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--cases", type=int, default=150, help="kinds of calls, each of one or two kernels")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launch", default="auto", help="auto, token_linear or grid_2d")
    parser.add_argument("--json", type=Path, help="a file for the report")
    parser.add_argument("--between-meetings", type=float, default=20.0, help="seconds")
    given = parser.parse_args(arguments)
    jitrope.configure(launch=given.launch)
    runtime.MAX_RECENT, enqueue.MAX_LAUNCHES = KEPT_CALLS, KEPT_LAUNCHES
    report = Soak(given).run()
    lines = [f"{'op':<34}{'calls':>10}{'against CPU':>14}{'against bits':>14}"]
    for op, count in report["ops"].items():
        lines.append(f"{op:<34}" + f"{count['calls']:>10}{count['against the CPU']:>14}{count['against bits']:>14}")
    of = ("allocated", "reserved", "device", "RSS")
    lines += ["", "nothing in flight, at" + "".join(f"{name:>11}" for name in ("calls", *of)) + "   MiB"]
    for at in report["meetings"]:
        mib = "".join(f"{at[name.lower()] / MIB:>11.3f}" for name in of)
        lines.append(f"{at['seconds']:>19.0f} s{at['calls']:>11}{mib}")
    lines += ["", *report["wrong"], *report["failed"]]
    flat = not any(problem.startswith(("memory", "too short")) for problem in report["problems"])
    lines += [
        f"{report['gpu'] or 'CPU'}, torch {report['torch']}: {report['threads']} threads, {report['streams']} streams, "
        f"{report['cases']} cases of seed {report['seed']}, {report['kernels']} kernels",
        f"calls {report['calls']}, wrong results {report['wrong results']}, exceptions {report['exceptions']}",
        f"memory flat: {'yes' if flat else 'no'}",
    ]
    print(*lines, *report["problems"], sep="\n", flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
