"""PTX, read as a graph of instructions, and rules that hold on every path through it.

    Before(x, (y, z), w)  going back from each x, y is met and then z, and no w first
    After(x, (y, z), w)   going on from each x, likewise, and the path does not end first
    Around(x, y)          each loop through an x goes through a y
    Has(x), Never(x)      there is one, there is none

On a path two branches on one predicate go the same way, if nothing sets it in between. No other values are followed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

JOIN = r"barrier\.sync\s+1\b"
"""Where the warps of a specialised kernel go apart and come together."""


class Before(NamedTuple):
    what: str
    needed: str | tuple[str, ...]
    first: str | None = None
    may_lack: bool = False  # whether a kernel without `what` is well too


class After(NamedTuple):
    what: str
    needed: str | tuple[str, ...]
    first: str | None = None
    may_lack: bool = False


class Around(NamedTuple):
    what: str
    needed: str


class Has(NamedTuple):
    what: str


class Never(NamedTuple):
    what: str


Rule = Before | After | Around | Has | Never


@dataclass
class Graph:
    """Instructions, and which may come after each.

    Attributes:
        text: of each. Behind a TMA access the number of the kernel's parameter that describes the matrix: "of 5".
        next: numbers of those after it.
        jump: for a branch on a predicate the predicate, its value for the jump, and whereto.
    """

    text: list[str]
    next: list[list[int]]
    jump: dict[int, tuple[str, bool, int]]
    _found: dict[str, set[int]] = field(default_factory=dict)

    @cached_property
    def previous(self) -> list[list[int]]:
        previous: list[list[int]] = [[] for _ in self.text]
        for i, to in enumerate(self.next):
            for j in to:
                previous[j].append(i)
        return previous

    @cached_property
    def sets(self) -> list[set[str]]:
        """The predicates that each instruction sets."""
        return [set(re.findall(r"%p\d+", re.sub(r"^@\S+ ", "", text).split(",")[0])) for text in self.text]

    def found(self, pattern: str | None) -> set[int]:
        """Numbers of the instructions with a pattern in them."""
        if pattern is None:
            return set()
        if pattern not in self._found:
            search = re.compile(pattern).search
            self._found[pattern] = {i for i, text in enumerate(self.text) if text and search(text)}
        return self._found[pattern]

    def role(self, pattern: str) -> "Graph":
        """Of a specialised kernel, what the warps run that get to such an instruction, between two joins."""
        joins, inside, todo = self.found(JOIN), set[int](), list(self.found(pattern))
        while todo:
            i = todo.pop()
            if i not in inside:
                inside.add(i)
                todo += [] if i in joins else self.next[i] + self.previous[i]
        return Graph(
            [text if i in inside else "" for i, text in enumerate(self.text)],
            [[j for j in to if j in inside] if i in inside else [] for i, to in enumerate(self.next)],
            self.jump,
        )

    def breach(self, start: int, back: bool, needed: tuple[str, ...], first: str | None) -> bool:
        """Whether a path from an instruction, itself excluded, does not meet all that is needed, in order.

        Going on, a path that ends in a trap is well.
        """
        # Most rules hold even if branches go any way, which is found much sooner.
        return all(self._breach(start, back, needed, first, learn) for learn in (False, True))

    def _breach(self, start: int, back: bool, needed: tuple[str, ...], first: str | None, learn: bool) -> bool:
        edges, bad = self.previous if back else self.next, self.found(first)
        stages = [{start}, *(self.found(pattern) for pattern in needed)]
        known: frozenset[tuple[str, bool]] = frozenset()
        todo, seen = [(start, 0, known)], {(start, 0, known)}
        while todo:
            i, stage, known = todo.pop()
            if i in stages[stage]:
                stage += 1
                if stage == len(stages):
                    continue
            elif i in bad:
                return True
            if not edges[i] and (back or "trap" not in self.text[i]):
                return True
            if learn and self.sets[i]:
                known = frozenset(fact for fact in known if fact[0] not in self.sets[i])
            for j in edges[i]:
                branch, to = (j, i) if back else (i, j)
                learned = _learned(known, branch, to, self.jump[branch]) if learn and branch in self.jump else known
                state = j, stage, learned
                if learned is not None and state not in seen:
                    seen.add(state)
                    todo.append((j, stage, learned))
        return False

    def loop(self, start: int, without: str) -> bool:
        """Whether a way leads from an instruction back to it that avoids others."""
        bad, seen, todo = self.found(without), set[int](), list(self.next[start])
        while todo:
            i = todo.pop()
            if i not in seen and i not in bad:
                seen.add(i)
                todo += self.next[i]
        return start in seen


def _learned(
    known: frozenset[tuple[str, bool]], branch: int, to: int, jump: tuple[str, bool, int]
) -> frozenset[tuple[str, bool]] | None:
    """What is known of predicates on the way from a branch to an instruction, or None if there is no such way."""
    predicate, value, target = jump
    if target == branch + 1:
        return known
    if to != target:
        value = not value
    return None if (predicate, not value) in known else known | {(predicate, value)}


def read(ptx: str) -> Graph:
    """Parse the one function of a PTX text.

    What cannot be reached is left out. Triton closes the loop around a `trap`, and the jump back from behind it, which
    never happens, would else be a path to the loop's head on which there is no signal and no fence.
    """
    body = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    body = body[body.index("{", body.index(".entry")) + 1 :]
    body = re.sub(r"^\s*\.(loc|section|file|pragma|b8|b16|b32|b64)\b.*$", "", body, flags=re.MULTILINE)
    text: list[str] = []
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    parameters: dict[str, str] = {}  # by the register that has its address
    for statement in re.split(r";", body):
        rest = statement.strip(" \t\n{}")
        while label := re.match(r"(\$?[\w$]+):\s*", rest):
            rest, name = rest[label.end() :].strip(" \t\n{}"), label[1]
            labels[name] = len(text)
        if rest.startswith(".branchtargets"):
            tables[name] = re.findall(r"\$[\w$]+", rest)
        elif rest and not rest.startswith("."):
            rest = " ".join(rest.split())
            if copied := re.match(r"(?:mov|cvta)\S* (%rd\d+), (?:\w+_param_(\d+)|(%rd\d+))$", rest):
                parameters[copied[1]] = copied[2] or parameters.get(copied[3], "")
            elif matrix := re.search(r"cp\.async\.bulk\.tensor.*\[(%rd\d+), \{", rest):
                rest += f" of {parameters.get(matrix[1])}"
            text.append(rest)
    following: list[list[int]] = []
    jumps: dict[int, tuple[str, bool, int]] = {}
    for i, instruction in enumerate(text):
        guard, plain = "", instruction
        if instruction[0] == "@":
            guard, _, plain = instruction[1:].partition(" ")
        if re.match(r"(ret|exit|trap)\b", plain):
            to: list[int] = []
        elif jump := re.match(r"bra(?:\.uni)?\s+(\$[\w$]+)", plain):
            to = [labels[jump[1]]]
            if guard:
                jumps[i] = guard.lstrip("!"), guard[0] != "!", to[0]
        elif plain.startswith("brx.idx"):
            to = sorted({labels[name] for name in tables[re.findall(r"\$[\w$]+", plain)[0]]})
        else:
            to = [i + 1]
        if guard and i + 1 not in to:
            to.append(i + 1)
        following.append([j for j in to if j < len(text)])
    reached, todo = {0}, [0]
    while todo:
        new = set(following[todo.pop()]) - reached
        reached |= new
        todo += new
    for i in set(range(len(text))) - reached:
        text[i], following[i] = "", []
        jumps.pop(i, None)
    branches = [predicate for predicate, _, _ in jumps.values()]
    # Of a predicate with one branch nothing is to be learned.
    return Graph(text, following, {i: jump for i, jump in jumps.items() if branches.count(jump[0]) > 1})


def problems(ptx: str, rules: Mapping[str, Iterable[Rule]]) -> list[str]:
    """What a PTX text breaks.

    Args:
        rules: under "" those of the whole kernel, under a pattern those of the warps that run such an instruction.
    """
    whole, found = read(ptx), []
    if "multimem" in ptx:
        found.append("multimem: multicast is not to be used")
    for pattern, of_role in rules.items():
        graph = whole.role(pattern) if pattern else whole
        for rule in of_role:
            places = sorted(graph.found(rule.what))
            if isinstance(rule, Never):
                found += [f"{graph.text[i]!r}: {rule}" for i in places]
                continue
            if not places and not (isinstance(rule, Before | After) and rule.may_lack):
                found.append(f"no {rule.what}")
            for i in places:
                if isinstance(rule, Around):
                    broken = graph.loop(i, rule.needed)
                elif isinstance(rule, Before | After):
                    needed = (rule.needed,) if isinstance(rule.needed, str) else rule.needed
                    broken = graph.breach(i, isinstance(rule, Before), needed, rule.first)
                else:
                    broken = False
                if broken:
                    found.append(f"{graph.text[i]!r}: {rule}")
    return found


# --- to spoil a text ---------------------------------------------------------------------------------------------


def _places(ptx: str, instruction: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"(@!?%p\d+\s+)?({instruction})[^;\n]*;", ptx))


def without(ptx: str, instruction: str, nth: int = 0) -> str:
    """The text without an instruction, guard included; others of its line stay."""
    at = _places(ptx, instruction)[nth]
    return ptx[: at.start()] + ptx[at.end() :]


def moved(ptx: str, instruction: str, behind: str, nth: int = -1) -> str:
    """The text with its first such instruction behind one of another kind."""
    taken = _places(ptx, instruction)[0][0]
    ptx = without(ptx, instruction)
    at = _places(ptx, behind)[nth]
    return ptx[: at.end()] + "\n\t" + taken + ptx[at.end() :]


def replaced(ptx: str, old: str, new: str, nth: int | None = None) -> str:
    """The text with something else instead of all places of a pattern, or of one."""
    found = list(re.finditer(old, ptx))
    for at in reversed(found if nth is None else [found[nth]]):
        ptx = ptx[: at.start()] + new + ptx[at.end() :]
    assert found
    return ptx


def without_before(ptx: str, barrier: str, instruction: str, nth: int = 0) -> str:
    """The text without the barrier that comes last before an instruction."""
    at = _places(ptx, instruction)[nth].start()
    return without(ptx[:at], barrier, -1) + ptx[at:]


def without_behind(ptx: str, barrier: str, instruction: str, nth: int = 0) -> str:
    """The text without the barrier that comes first behind an instruction."""
    at = _places(ptx, instruction)[nth].end()
    return ptx[:at] + without(ptx[at:], barrier)
