"""Every interleaving of the signals and copies by which ranks share memory, in a model of `titanlite/kernels/device`.

Each rank's stream runs its operators one after the other; between ranks, steps come in any order. An operator of epoch
e takes slot e mod 2 of the memory, whatever its kind:

    all-gather      write own slot; signal all; wait for all; read each peer's slot
    pulling one     write own slot; signal all; of each peer in turn, wait for it and read its slot
    reduce-scatter  push a part into each peer's slot; signal all; wait for all; read own slot

What FSDP and experts exchange has one slot and two meetings, in each of which all signal and wait for all:

    exchange        meet; push a part into each peer's slot; meet; read own slot

A signal from one rank to another is a count that only grows, to e + 1; to wait is to see e + 1 from every rank. Nothing
else keeps a rank from overwriting what a peer has yet to read, so the model looks at every state that can be reached.

A second model has operators of several streams, which GPUs may begin in different orders.

A step happens at once here, and takes time on a GPU. Nothing is lost by that: if a write may overlap a read there, both
orders of the two are among the interleavings here, and one of them reads the wrong number. Nor by the fixed order in
which an operator visits its peers, as each visit may be as early or as late as any.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

import pytest

from tests.support.needs import slow

ALL_GATHER, PULL, REDUCE_SCATTER, EXCHANGE = "A", "P", "R", "X"


@dataclass(frozen=True)
class Protocol:
    """The rules, which faults change."""

    slots: int = 2
    counts_kinds_apart: bool = False
    waits: bool = True
    waits_for_last_epoch: bool = False
    signals_first: bool = False
    signals_one_peer: bool = False
    meets_before: bool = True
    meets_after: bool = True


class Step(NamedTuple):
    """One step of a stream: "write", "signal", "wait" or "read"."""

    does: str
    rank: int  # whose memory or flag it is
    slot: int = 0
    parts: tuple[int, ...] = ()  # of the slot, one for each rank; of a wait, the ranks whose signals are waited for
    value: tuple[str, int] | int = 0  # what a write leaves and a read wants, or the epoch


State = TypeVar("State")


def first_fault(
    start: State, moves: Callable[[State], Iterator[State | str]], is_end: Callable[[State], bool]
) -> str | None:
    """Search every state that moves lead to for a move that is a fault, in words, or a state without moves."""
    seen, left = {start}, [start]
    while left:
        state, stuck = left.pop(), True
        for reached in moves(state):
            if isinstance(reached, str):
                return reached
            stuck = False
            if reached not in seen:
                seen.add(reached)
                left.append(reached)
        if stuck and not is_end(state):
            return f"nobody can go on from {state}"
    return None


def stream(operators: str, me: int, ranks: int, protocol: Protocol) -> list[Step]:
    """The steps of one rank."""
    everyone = tuple(range(ranks))
    peers = [(me + i) % ranks for i in range(1, ranks)]
    steps: list[Step] = []
    for epoch, kind in enumerate(operators):
        count = operators[:epoch].count(kind) if protocol.counts_kinds_apart else epoch
        slot, value = count % protocol.slots, (kind, epoch)
        if kind == EXCHANGE:
            steps += exchange(me, ranks, epoch, protocol)
            continue
        if kind != REDUCE_SCATTER:
            writes = [Step("write", me, slot, everyone, value)]
            reads = [Step("read", peer, slot, everyone, value) for peer in peers]
        else:
            writes = [Step("write", peer, slot, (me,), value) for peer in (*peers, me)]
            reads = [Step("read", me, slot, everyone, value)]
        told = [peers[0], me] if protocol.signals_one_peer else [*peers, me]
        signals = [Step("signal", rank, value=epoch + 1) for rank in told]
        steps += signals + writes if protocol.signals_first else writes + signals
        wanted = epoch if protocol.waits_for_last_epoch else epoch + 1
        if kind == PULL and protocol.waits:
            steps += [step for read in reads for step in (Step("wait", me, parts=(read.rank,), value=wanted), read)]
            continue
        if protocol.waits:
            steps.append(Step("wait", me, parts=everyone, value=wanted))
        steps += reads
    return steps


def exchange(me: int, ranks: int, epoch: int, protocol: Protocol) -> list[Step]:
    """The steps of one rank in one exchange, whose meetings count two epochs."""
    everyone, value = tuple(range(ranks)), (EXCHANGE, epoch)

    def meeting(number: int) -> list[Step]:
        signals = [Step("signal", (me + i) % ranks, value=number) for i in range(1, ranks + 1)]
        return [*signals, Step("wait", me, parts=everyone, value=number)]

    before = meeting(2 * epoch + 1) if protocol.meets_before else []
    after = meeting(2 * epoch + 2) if protocol.meets_after else []
    pushes = [Step("write", (me + i) % ranks, 0, (me,), value) for i in range(1, ranks + 1)]
    return [*before, *pushes, *after, Step("read", me, 0, everyone, value)]


def fault_of_slots(operators: Sequence[str], protocol: Protocol) -> str | None:
    """Search all interleavings of the ranks' streams, a letter an operator, for a wrong number or an endless wait."""
    ranks = len(operators)
    streams = [stream(ops, me, ranks, protocol) for me, ops in enumerate(operators)]
    # How far a rank is says what it has signalled: signalled[rank][steps done][to].
    signalled = []
    for steps in streams:
        counts = [[0] * ranks]
        for step in steps:
            counts.append(list(counts[-1]))
            if step.does == "signal":
                counts[-1][step.rank] = int(step.value)  # type: ignore[arg-type]
        signalled.append(counts)

    def cells(step: Step) -> list[int]:
        return [(step.rank * protocol.slots + step.slot) * ranks + part for part in step.parts]

    touched = [[cells(step) for step in steps] for steps in streams]

    def moves(state: tuple[tuple, tuple]) -> Iterator[tuple[tuple, tuple] | str]:
        done, memory = state
        for me, at in enumerate(done):
            if at == len(streams[me]):
                continue
            step, after = streams[me][at], memory
            if step.does == "wait" and any(signalled[rank][done[rank]][me] < step.value for rank in step.parts):
                continue
            if step.does == "write":
                written = dict.fromkeys(touched[me][at], step.value)
                after = tuple(written.get(cell, value) for cell, value in enumerate(memory))
            elif step.does == "read" and (found := {memory[cell] for cell in touched[me][at]}) != {step.value}:
                yield f"rank {me} reads {found} of rank {step.rank}, wants {step.value}"
            yield (*done[:me], at + 1, *done[me + 1 :]), after

    start = ((0,) * ranks, (None,) * (ranks * protocol.slots * ranks))
    return first_fault(start, moves, lambda state: all(map(operator.eq, state[0], map(len, streams))))


@pytest.mark.parametrize(("ranks", "length"), [(2, 4), (2, 6), (3, 3), (3, 4), *slow((4, 2))])
def test_no_interleaving_reads_a_wrong_number_or_waits_forever(ranks: int, length: int):
    for operators in map("".join, product("APR", repeat=length)):  # shorter ones are how these begin
        assert fault_of_slots([operators] * ranks, Protocol()) is None, operators


@pytest.mark.parametrize("operators", ["AAA", "AAR", "ARA", "ARR", "RAA", "RAR", "RRA", "RRR", "PPP", "PRP", "RPA"])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (Protocol(slots=1), "reads"),
        (Protocol(waits=False), "reads"),
        (Protocol(waits_for_last_epoch=True), "reads"),
        (Protocol(signals_first=True), "reads"),
        (Protocol(signals_one_peer=True), "nobody can go on"),
    ],
    ids=["one-slot", "no-wait", "wait-for-last-epoch", "signal-first", "signal-one-peer"],
)
def test_faults_are_found(fault: Protocol, found: str, operators: str):
    assert found in (fault_of_slots([operators] * 3, fault) or "")


@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 2)])
def test_one_slot_is_enough_between_two_meetings(ranks: int, calls: int):
    assert fault_of_slots([EXCHANGE * calls] * ranks, Protocol(slots=1)) is None
    for fault in (Protocol(slots=1, meets_before=False), Protocol(slots=1, meets_after=False)):
        assert "reads" in (fault_of_slots([EXCHANGE * calls] * ranks, fault) or "")


def test_slots_must_be_counted_over_both_kinds():
    apart = Protocol(counts_kinds_apart=True)
    assert fault_of_slots(["AAA"] * 2, apart) is None
    assert "reads" in (fault_of_slots(["AR"] * 2, apart) or "")


def test_ranks_must_agree_on_the_order():
    assert "reads" in (fault_of_slots(["AR", "RA"], Protocol()) or "")
    assert "nobody can go on" in (fault_of_slots(["AA", "A"], Protocol()) or "")


class Operator(NamedTuple):
    """An operator among those that every rank issues."""

    group: tuple[int, ...]  # ranks that meet in it
    stream: int  # on which a rank issues it


def fault_of_streams(issued: Sequence[Sequence[Operator]], room: int, ordered: bool) -> str | None:
    """Search all ways in which GPUs may run operators of several streams for two that meet wrongly, or a deadlock.

    An operator that has begun holds its GPU until it ends; another begins beside it if there is room. It reads its
    group's epoch e, signals e + 1, waits until all ranks of the group have, and ends by counting the epoch on.

    Args:
        issued: each rank's operators in the order in which it issues them, by which ranks know one from another.
        room: how many operators a GPU runs at once.
        ordered: whether an operator waits for the end of all that the rank issued before, else of its stream's.
    """
    names = [[(op, ops[:i].count(op)) for i, op in enumerate(ops)] for ops in issued]
    before = [
        [[j for j in range(i) if ordered or ops[j].stream == op.stream] for i, op in enumerate(ops)] for ops in issued
    ]

    def signalled(state: tuple, rank: int, group: tuple[int, ...], epoch: int) -> list[tuple[Operator, int]]:
        far = zip(issued[rank], names[rank], state[rank], strict=True)
        return [name for op, name, (taken, _) in far if op.group == group and taken == epoch]

    def moves(state: tuple) -> Iterator[tuple | str]:
        for me, far in enumerate(state):
            for i, (op, name) in enumerate(zip(issued[me], names[me], strict=True)):
                taken, ended = far[i]
                if ended:
                    continue
                if taken is None:
                    running = sum(at is not None and not over for at, over in far)
                    if running == room or not all(far[j][1] for j in before[me][i]):
                        continue
                    now = sum(over and of.group == op.group for of, (_, over) in zip(issued[me], far, strict=True))
                    if signalled(state, me, op.group, now):
                        yield f"rank {me}: two operators take epoch {now}"
                else:
                    now, met = taken, [signalled(state, peer, op.group, taken) for peer in op.group]
                    if [] in met:
                        continue
                    if any(theirs != [name] for theirs in met):
                        yield f"rank {me}: {name} meets another operator"
                yield (*state[:me], (*far[:i], (now, taken is not None), *far[i + 1 :]), *state[me + 1 :])

    # Of each rank, of each operator: the epoch that it took, or None, and whether it has ended.
    start = tuple(((None, False),) * len(ops) for ops in issued)
    return first_fault(start, moves, lambda state: all(over for far in state for _, over in far))


BOTH, OTHERS, ENDS = (0, 1), (1, 2), (0, 2)


def issued(ranks: int, *operators: tuple[tuple[int, ...], int]) -> list[list[Operator]]:
    """Each rank's part of what all issue in one order."""
    return [[Operator(*op) for op in operators if me in op[0]] for me in range(ranks)]


@pytest.mark.parametrize(
    ("operators", "room", "found"),
    [
        (issued(2, (BOTH, 0), (BOTH, 1)), 1, "meets another operator"),
        (issued(2, (BOTH, 0), (BOTH, 1)), 2, "two operators take epoch 0"),
        (issued(3, (BOTH, 0), (OTHERS, 1), (ENDS, 0)), 1, "nobody can go on"),
        (issued(4, ((0, 1, 2, 3), 0), (BOTH, 1), ((2, 3), 1), ((0, 1, 2, 3), 0)), 1, "nobody can go on"),
        (issued(4, (BOTH, 0), ((2, 3), 0), ((0, 2), 1), ((1, 3), 1)), 1, "nobody can go on"),
    ],
    ids=["one-group-alone", "one-group-beside", "a-ring-of-groups", "a-group-within", "rows-and-columns"],
)
def test_operators_of_two_streams_need_an_order(operators: list[list[Operator]], room: int, found: str):
    assert found in (fault_of_streams(operators, room, ordered=False) or "")
    assert fault_of_streams(operators, room, ordered=True) is None


def test_an_order_of_streams_must_be_that_of_all_ranks():
    first, second = Operator(BOTH, 0), Operator((0, 1, 2), 1)
    for room in (1, 2):
        assert fault_of_streams([[first, second], [second, first], [second]], room, ordered=True)
