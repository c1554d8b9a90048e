"""What devices exchange in a compiled program: counted from its text, without running it.

    program = jax.jit(step, …).lower(…).compile()
    for one in collectives(program.as_text()): one.op, one.bytes, one.runs, one.rounds, one.scope

XLA may still merge, split or hide them behind computation; the counts are those of the text.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
_OPS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (?P<shape>.*?) (?P<op>{_OPS})(?P<start>-start)?\(")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TEST = re.compile(r"ROOT .* compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT")


class Collective(NamedTuple):
    """One instruction that exchanges data between the devices of a group."""

    op: str
    """`all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`."""
    bytes: int
    """Of the whole array, of which a device of an all-gather or reduce-scatter holds a piece."""
    group: int
    """Devices that take part; 1 for a collective-permute, which tells pairs."""
    runs: int
    """How often it runs, by the loops around it whose lengths are known."""
    rounds: bool
    """Whether it runs so often in every round of a loop whose length is known only at run time."""
    scope: str
    """The names around it, `jax.named_scope`s among them."""

    @property
    def traffic(self) -> float:
        """Bytes that a device sends in one run of a ring: (g−1)/g of the whole, twice for an all-reduce."""
        if self.op == "collective-permute":
            return self.bytes
        return (2 if self.op == "all-reduce" else 1) * self.bytes * (self.group - 1) / max(self.group, 1)


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program's text, `compiled.as_text()`, in its order.

    Those of a computation that is called from several places are listed once for each.
    """
    computations, entry = _computations(text)

    def walk(name: str, runs: int, rounds: bool, begun: set[str] | None = None) -> Iterator[Collective]:
        own: set[str] = set()  # TPU: one that goes on behind several fusions is written in each, on one channel
        for line in computations.get(name, ()):
            found, channel = _COLLECTIVE.search(line), _CHANNEL.search(line)
            if found and not (begun and channel and channel[1] in begun):
                yield _collective(line, found, runs, rounds)
                if begun is not None and channel:
                    begun.add(channel[1])
            here, unknown = runs, rounds
            if " while(" in line:
                trips = _trips(line, computations)
                here, unknown = runs * (trips or 1), rounds or trips is None
            branches = _BRANCHES.search(line)
            inner = _CALLED.findall(line) + ([] if branches is None else re.findall(r"[\w.\-]+", branches.group(1)))
            for one in inner:
                yield from walk(one, here, unknown, own if " fusion(" in line else None)

    return list(walk(entry, 1, False))


def totals(found: list[Collective]) -> dict[str, dict[str, list[int]]]:
    """By op, apart for what runs in a round and what runs once: {op: {"once" or "a round": [runs, bytes, largest]}}."""
    summed: dict[str, dict[str, list[int]]] = {}
    for one in found:
        entry = summed.setdefault(one.op, {}).setdefault("a round" if one.rounds else "once", [0, 0, 0])
        entry[:] = entry[0] + one.runs, entry[1] + one.runs * one.bytes, max(entry[2], one.bytes)
    return summed


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by name, and the name of the one that is the program."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif line.startswith(" "):
            lines.append(line)
    return computations, entry


def _trips(line: str, computations: dict[str, list[str]]) -> int | None:
    """Runs of a loop's body: as told, or by a counter from 0 to a constant (TPU); None: known at run time only."""
    told = _TRIPS.search(line)
    if told:
        return int(told[1])
    condition, body = (
        computations.get(re.findall(rf"{part}=%?([\w.\-]+)", line)[0], []) for part in ("condition", "body")
    )
    test = next(filter(None, map(_TEST.match, (one.strip() for one in condition))), None)
    counter, most = (None, None) if test is None else (_index(condition, test[1]), _constant(condition, test[2]))
    if counter is None or most is None:
        return None
    root = next(re.sub(r"/\*.*?\*/", "", one) for one in body if "ROOT" in one)
    operands = re.findall(r"%([\w.\-]+)", root[root.rindex(" tuple(") :])
    added = re.search(r" add\(%[\w.\-]+, %([\w.\-]+)\)", _defined(body, operands[counter]))
    step = _constant(body, added[1]) if added else None
    return -(-most // (step or 1))


def _defined(lines: list[str], name: str) -> str:
    """The instruction of that name."""
    return next((line for line in lines if line.split(" = ")[0].endswith(f"%{name}")), "")


def _constant(lines: list[str], name: str) -> int | None:
    found = re.search(r" constant\((\d+)\)", _defined(lines, name))
    return int(found[1]) if found else None


def _index(lines: list[str], name: str) -> int | None:
    found = re.search(r" get-tuple-element\(.*\), index=(\d+)", _defined(lines, name))
    return int(found[1]) if found else None


def _collective(line: str, found: re.Match[str], runs: int, rounds: bool) -> Collective:
    op, group, scope = found["op"], _group(line), re.search(r'op_name="([^"]*)"', line)
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", re.sub(r"/\*.*?\*/", "", found["shape"]))
    sizes = [math.prod(int(n) for n in dims.split(",") if n) * _SIZES.get(kind, 4) for kind, dims in arrays]
    if found["start"] and op != "all-reduce":  # operands stand before results
        sizes = sizes[1:2] if op == "collective-permute" else sizes[len(sizes) // 2 :]
    size = sum(sizes) * (group if op == "reduce-scatter" else 1)
    return Collective(op, size, group, runs, rounds, "" if scope is None else scope.group(1))


def _group(line: str) -> int:
    """Devices of a group, from any of the ways in which XLA writes them."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = dict(part.split("=") for part in mesh.group(1).split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in mesh.group(2).split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed is None and "collective-permute" not in line:
        raise ValueError(f"the devices of this collective are written in a way that is not known: {line.strip()}")
    return 1 if listed is None else len(listed.group(1).split(","))
