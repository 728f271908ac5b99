"""Profile and explain 30 faults, each beside its clean twin, written without knowing the rules.

python benchmarks/unseen_faults.py --set second --out FOLDER [NAME ...]      # on a GPU
python benchmarks/unseen_faults.py --set second --out FOLDER --device cpu --tiny
python benchmarks/unseen_faults.py --set third --out FOLDER --device cpu     # its own sizes there

Every twin runs in processes of its own: `steplab profile FILE.py:TWIN`, or the file itself where it
has its own loop, which calls steplab.profile. Imports of the next ones go on while one has its turn
at the device; they wait for their turn in common.my_turn. With --overlap a turn ends when the times
and the detailed step are recorded; memory and values are then recorded beside the next turn, which
begins by building its model. `steplab explain` reads the Run.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = HERE / "unseen_faults"
SETS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
]


@dataclass
class Twin:
    """One half of a fault, and what became of it."""

    name: str
    kind: str
    path: Path
    declared: dict
    folder: Path
    process: subprocess.Popen | None = None
    log: Path = Path()
    started: float = 0.0
    row: dict = field(default_factory=dict)


def declaration(path: Path) -> tuple[dict, int]:
    """Return the FAULT dict of a file and the line of its marker, without importing it."""
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FAULT":
            lines = [
                i
                for i, line in enumerate(text.splitlines(), 1)
                if line.rstrip().endswith(("  # FAULT", "  # guilty"))
            ]
            return ast.literal_eval(node.value), lines[0]
    raise ValueError(f"{path.name} declares no FAULT")


def batch_size(declared: dict, device: str, tiny: bool) -> int:
    """Return the batch size of a factory: a set may declare one for a CPU beside that for a GPU."""
    if device == "cpu" and "CPU_BATCH" in declared:
        return declared["CPU_BATCH"]
    return min(2, declared["BATCH"]) if tiny else declared["BATCH"]


def environment(arguments: argparse.Namespace, turn: Path, style: str = "") -> dict[str, str]:
    """Return the environment of one twin."""
    parts = [str(FAULTS), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in parts if p),
        "UNSEEN_TURN": str(turn),
        "UNSEEN_DEVICE": arguments.device,
        "UNSEEN_TINY": "1" if arguments.tiny else "0",
        "COLUMNS": "160",
    }
    if style == "factory":
        variables["UNSEEN_WAITS"] = "1"  # its worker waits where it imports what the faults share
    return variables


def start(twin: Twin, arguments: argparse.Namespace) -> None:
    """Start a twin's process; it imports, builds its model and waits for its turn."""
    shutil.rmtree(twin.folder, ignore_errors=True)
    twin.folder.mkdir(parents=True)
    twin.log = twin.folder / "profile.log"
    if twin.declared["STYLE"] == "loop":
        command = [sys.executable, str(twin.path), twin.kind]
    else:
        batch = batch_size(twin.declared, arguments.device, arguments.tiny)
        command = [sys.executable, "-m", "steplab", "profile", f"{twin.path}:{twin.kind}"]
        command += ["--batch", str(batch), "--device", arguments.device, "--store", "steplab-runs"]
        command += ["--timeout", str(int(arguments.timeout + arguments.ahead * arguments.timeout))]
    with twin.log.open("w") as log:
        twin.process = subprocess.Popen(
            command,
            cwd=twin.folder,
            env=environment(arguments, twin.folder / "turn", twin.declared["STYLE"]),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def measure(twin: Twin, timeout: float, overlap: bool) -> None:
    """Give a twin its turn; wait until it ends, or is recorded if turns may overlap."""
    began = time.monotonic()
    (twin.folder / "turn").touch()
    while twin.process.poll() is None:
        if overlap and any(twin.folder.glob("steplab-runs/runs/*/detail.json.gz")):
            break
        if time.monotonic() - began > timeout:
            break
        time.sleep(0.02)
    twin.row["turn_s"] = round(time.monotonic() - began, 2)


def finish(twin: Twin, timeout: float) -> None:
    """Wait until a twin that had its turn ends, or until its time is over."""
    try:
        code = twin.process.wait(max(0.1, timeout - twin.row["turn_s"]))
        twin.row["status"] = "ok" if code == 0 else f"profile: exit code {code}"
    except subprocess.TimeoutExpired:
        stop(twin)
        twin.row["status"] = f"profile: not done after {timeout:g} s"


def stop(twin: Twin) -> None:
    """End a twin's process and its workers."""
    if twin.process is not None and twin.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(twin.process.pid, signal.SIGKILL)
        twin.process.wait()


def explain(twin: Twin, arguments: argparse.Namespace, out: Path) -> None:
    """Explain a twin's Run, save the text, and fill in its row."""
    row, target = twin.row, out / f"{twin.name}.{twin.kind}.txt"
    profiled = twin.log.read_text(errors="replace")
    records = sorted(twin.folder.glob("steplab-runs/runs/*/run.json"))
    if not records:
        target.write_text(f"{row['status']}\n\n{profiled}")
        row["status"] = row["status"] if row["status"] != "ok" else "no Run was stored"
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "steplab", "explain", "last", "--store", "steplab-runs"],
            cwd=twin.folder,
            env=environment(arguments, twin.folder / "turn"),
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
        )
        text = done.stdout + done.stderr
        if done.returncode and row["status"] == "ok":
            row["status"] = f"explain: exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        text, row["status"] = "", "explain: too slow"
    target.write_text(f"{text}\n{'=' * 40} steplab profile {'=' * 40}\n{profiled}")
    read_findings(row, text)
    read_record(row, records[-1], twin.folder / "clock.json")


def read_findings(row: dict, text: str) -> None:
    """Take the findings above the notes, and the lines that they name, from explain's text."""
    body = text.split("\nnotes:")[0]
    found = list(re.finditer(r"^(\d+)\. (\S+)(.*)\n +(.*)$", body, re.MULTILINE))
    row["findings"] = len(found)
    row["rules"] = [f"{m[2]}{m[3]}" for m in found]
    row["first"] = f"{found[0][2]}: {found[0][4].strip()}" if found else ""
    after = body[found[0].start() :] if found else ""
    row["lines"] = list(dict.fromkeys(re.findall(r"[\w./-]+\.py:\d+", after)))
    row["note_lines"] = list(dict.fromkeys(re.findall(r"[\w./-]+\.py:\d+", text[len(body) :])))


def read_record(row: dict, record: Path, clock: Path) -> None:
    """Take step time and memory from the Run, and the loop's own clock where there is one."""
    run = json.loads(record.read_text())["run"]
    row["run_status"], row["reason"] = run["status"], run["reason"]
    samples = (run.get("clock") or {}).get("step") or {}
    times = (
        samples.get("ms")
        or samples.get("values")
        or [v for v in samples.values() if isinstance(v, list)]
    )
    while times and isinstance(times[0], list):
        times = times[0]
    row["run_ms"] = statistics.median(times) if times else None
    row["step_ms"] = json.loads(clock.read_text())["step_ms"] if clock.exists() else row["run_ms"]
    memory = run.get("memory") or {}
    row["peak_gib"] = memory["peak"] / 2**30 if memory.get("peak") else None


def names(text: str, line: str) -> bool:
    """Return whether a text names this file:line."""
    return re.search(re.escape(line) + r"(?!\d)", text) is not None


def table(rows: list[dict]) -> str:
    """Return the summary as text."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [
        f"{'name':24} {'kind':6} {'faulty ms':>9} {'clean ms':>9} {'diff':>7} {'GiB':>6} "
        f"{'clean':>6} {'found':>5} {'clean':>5} {'line':>9}  first finding of the faulty twin"
    ]
    for row in rows:
        bad, good = row["faulty"], row["clean"]
        diff = ""
        if bad.get("step_ms") and good.get("step_ms"):
            diff = f"{100 * (bad['step_ms'] / good['step_ms'] - 1):+.0f} %"
        named = f"{row['file']}:{row['line']}"
        hit = "first" if names(row["first_lines"], named) else "-"
        if hit == "-" and names(" ".join(bad.get("lines", [])), named):
            hit = "later"
        problems = "; ".join(
            f"{k}: {t['status']}"
            for k, t in (("faulty", bad), ("clean", good))
            if t["status"] != "ok"
        )
        lines.append(
            f"{row['name']:24} {row['kind']:6} {number(bad.get('step_ms')):>9} "
            f"{number(good.get('step_ms')):>9} {diff:>7} {number(bad.get('peak_gib')):>6} "
            f"{number(good.get('peak_gib')):>6} {bad.get('findings', '-'):>5} "
            f"{good.get('findings', '-'):>5} {hit:>9}  {problems or bad.get('first', '')}"
        )
        found = ", ".join(bad.get("lines", [])) or "no line"
        lines.append(f"{'':24} fault at {named}; findings name {found}")
        if good.get("findings"):
            lines.append(f"{'':24} clean twin: {'; '.join(good['rules'])}")
    return "\n".join(lines) + "\n"


def first_lines(out: Path, name: str) -> str:
    """Return the text of the first finding of a faulty twin."""
    path = out / f"{name}.faulty.txt"
    text = path.read_text().split("\n" + "=" * 40)[0].split("\nnotes:")[0] if path.exists() else ""
    match = re.search(r"^1\. .*?(?=^2\. |\Z)", text, re.MULTILINE | re.DOTALL)
    return match[0] if match else ""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", default="first", choices=SETS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it on a CPU")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th fault, from the K-th")
    parser.add_argument("--timeout", type=float, default=75.0, help="seconds of a turn")
    parser.add_argument("--ahead", type=int, default=4, help="processes that get ready meanwhile")
    parser.add_argument("--overlap", action="store_true", help="end turns once times are recorded")
    parser.add_argument("--readers", type=int, default=3, help="Runs explained at a time")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds until none starts")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    paths = sorted((FAULTS / arguments.set).glob("*.py"))
    unknown = set(arguments.names) - {p.stem for p in paths}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if not (written := re.fullmatch(r"(\d+)/(\d+)", arguments.part)):
        parser.error(f"--part must be K/N, not {arguments.part!r}")
    part, parts = map(int, written.groups())
    if not 1 <= part <= parts:
        parser.error(f"--part must be K/N with K from 1 to N, not {arguments.part!r}")
    paths = [p for p in paths if not arguments.names or p.stem in arguments.names][
        part - 1 :: parts
    ]
    twins, rows = [], []
    for path in paths:
        declared, line = declaration(path)
        pair = [
            Twin(path.stem, k, path, declared, out / "work" / f"{path.stem}.{k}")
            for k in ("faulty", "clean")
        ]
        twins += pair
        rows.append(
            {
                "name": path.stem,
                "kind": declared["KIND"],
                "cause": declared["CAUSE"],
                "fix": declared["FIX"],
                "file": path.name,
                "line": line,
                "faulty": pair[0].row,
                "clean": pair[1].row,
            }
        )
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(arguments.readers) as readers:
            for index, twin in enumerate(twins):
                if time.monotonic() - began > arguments.budget:
                    break
                for upcoming in twins[index : index + 1 + arguments.ahead]:
                    if upcoming.process is None:
                        start(upcoming, arguments)
                measure(twin, arguments.timeout, arguments.overlap)
                said = f"{twin.name}.{twin.kind}: {twin.row['turn_s']} s"
                print(f"{time.monotonic() - began:6.1f} s  {said}", flush=True)
                if not arguments.overlap:
                    finish(twin, arguments.timeout)
                readers.submit(guarded_explain, twin, arguments, out)
    finally:
        for twin in twins:
            stop(twin)
            twin.row.setdefault("status", "not run")
        write(rows, out, part, parts)
    print(table(rows) + f"{time.monotonic() - began:.0f} s in all")


def write(rows: list[dict], out: Path, part: int, parts: int) -> None:
    """Write the summary of this part, and that of all parts once they are there."""
    for row in rows:
        row["first_lines"] = first_lines(out, row["name"])
    suffix = "" if parts == 1 else f".{part}of{parts}"
    (out / f"summary{suffix}.json").write_text(json.dumps(rows, indent=1))
    (out / f"summary{suffix}.txt").write_text(table(rows))
    if parts > 1:
        merge(out, parts)


def guarded_explain(twin: Twin, arguments: argparse.Namespace, out: Path) -> None:
    """Explain; what goes wrong becomes the row's status."""
    try:
        if "status" not in twin.row:
            finish(twin, arguments.timeout)
        explain(twin, arguments, out)
        if twin.row["status"] != "ok":
            said = [
                line for line in twin.log.read_text(errors="replace").splitlines() if line.strip()
            ]
            twin.row["status"] += f": {said[-1].strip()[:300]}" if said else ""
    except Exception as error:
        twin.row["status"] = f"reading the result: {type(error).__name__}: {error}"


def merge(out: Path, parts: int) -> None:
    """Write one summary of all parts once they are there."""
    files = [out / f"summary.{k}of{parts}.json" for k in range(1, parts + 1)]
    if all(f.exists() for f in files):
        rows = sorted(
            (r for f in files for r in json.loads(f.read_text())), key=lambda r: r["name"]
        )
        (out / "summary.json").write_text(json.dumps(rows, indent=1))
        (out / "summary.txt").write_text(table(rows))


if __name__ == "__main__":
    main()
