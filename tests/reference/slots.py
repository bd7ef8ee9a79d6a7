"""The slot store's rules in the plainest Python: the judge of `kernels/cpu/slots.py`.

Owns one dictionary of slices and the sentences of the policy. Knows nothing of memory, files or threads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

KEEPS = 0.0, 0.5 ** (1 / 3), 0.5 ** (1 / 16)
Slice = tuple[str, int, int, int]  # model, layer, tower, expert


@dataclass
class Held:
    age: int
    score: float = 1.0
    users: int = 0


@dataclass
class NaiveVisit:
    holds: list[Slice] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    wave: list[int] = field(default_factory=list)
    exhausted: list[Slice] = field(default_factory=list)  # of the present wave
    most: int = 0  # slices a wave may bring in


class NaiveStore:
    def __init__(self, num_slots: int, policy: str, models: dict[str, tuple[int, int, int]]) -> None:
        """`models`: layers, towers and experts of each."""
        self.num_slots, self.policy, self.models = num_slots, policy, models
        self.held: dict[Slice, Held] = {}
        self.counters: Counter[str] = Counter()
        self.age = self.clock = 0
        self.heat = {(m, il): [[0.0] * 3 for _ in range(experts)] for m, (layers, _, experts) in models.items() for il in range(layers)}
        self.tokens = {where: [0.0] * 3 for where in self.heat}
        self.shares = {where: [0.1, 0.3, 0.55, 0.05] for where in self.heat}
        self.chance = dict.fromkeys(self.heat, 0.0)
        self.visited = dict.fromkeys(self.heat, 0)

    # -- a layer's visit
    def visit(self, visit: NaiveVisit, model: str, layer: int, chosen: dict[int, int], tokens: int, seqs: int) -> None:
        """A new layer: `chosen` says how often each expert was."""
        self._remember((model, layer), chosen, tokens, seqs)
        self.release(visit)
        towers = range(self.models[model][1])
        visit.most = self.num_slots if tokens == seqs else max(self.num_slots // 8, 4 * len(towers))
        there = [e for e in sorted(chosen) if all((model, layer, t, e) in self.held for t in towers)]
        visit.todo = there + [e for e in sorted(chosen) if e not in there]
        self.next_wave(visit, model, layer)

    def next_wave(self, visit: NaiveVisit, model: str, layer: int) -> None:
        self.release(visit)
        visit.wave, visit.exhausted, missing = [], [], []
        while visit.todo:
            slices = [(model, layer, t, visit.todo[0]) for t in range(self.models[model][1])]
            here = [s for s in slices if s in self.held]
            unused = sum(not self.held[s].users for s in here)
            if visit.wave and len(missing) + len(slices) - len(here) > min(visit.most, self._unprotected() - unused):
                break
            for s in here:
                self._use(visit, s)
                self.held[s].score += 1
                self.counters["hits"] += 1
            for s in slices:
                if s not in here:
                    (missing if len(missing) < self._unprotected() else visit.exhausted).append(s)
            visit.wave.append(visit.todo.pop(0))
        self._fill(visit, layer, model, missing)
        self.counters["misses"] += len(missing) + len(visit.exhausted)
        self.counters["fills"] += len(missing)
        self.counters["exhausted"] += len(visit.exhausted)

    def release(self, visit: NaiveVisit) -> None:
        for s in visit.holds:
            self.held[s].users -= 1
        visit.holds = []

    def drop(self, model: str) -> None:
        self.held = {s: held for s, held in self.held.items() if s[0] != model}

    # -- the rules
    def _unprotected(self) -> int:
        return self.num_slots - sum(held.users > 0 for held in self.held.values())

    def _use(self, visit: NaiveVisit, s: Slice) -> None:
        self.age += 1
        self.held[s].age = self.age
        self.held[s].users += 1
        visit.holds.append(s)

    def _fill(self, visit: NaiveVisit, layer: int, model: str, missing: list[Slice]) -> None:
        too_many = len(missing) - (self.num_slots - len(self.held))
        if too_many > 0:
            idle = [s for s, held in self.held.items() if not held.users]
            idle.sort(key=lambda s: (-self._badness(s, model, layer), self.held[s].age))
            for s in idle[:too_many]:
                del self.held[s]
            self.counters["evictions"] += too_many
        last = self.models[model][1] - 1
        for s in [s for s in missing if s[2] != last] + [s for s in missing if s[2] == last]:
            self.held[s] = Held(0)
            self._use(visit, s)

    def _badness(self, s: Slice, model: str, layer: int) -> float:
        held = self.held[s]
        if self.policy == "lru":
            return -held.age
        if self.policy == "decay":
            return -held.score
        its_model, its_layer, _, expert = s
        period = self.models[its_model][0]
        ahead = (its_layer - layer) % period or period if its_model == model else period
        idle = self.clock - self.visited[its_model, its_layer]
        fade = KEEPS[2] ** float(idle - 1) if idle > 1 else 1.0
        where = its_model, its_layer
        p = self.shares[where][3] * self.chance[where] * fade
        for i in range(3):
            p += self.heat[where][expert][i] * (self.shares[where][i] / max(self.tokens[where][i], 1.0) * fade)
        return max(period / max(p, 1e-6), float(period)) + float(ahead - period)

    def _remember(self, where: tuple[str, int], chosen: dict[int, int], tokens: int, seqs: int) -> None:
        if where[1] == 0:
            self.clock += 1
            for held in self.held.values():
                held.score *= 0.98
        self.visited[where] = self.clock
        pairs = float(sum(chosen.values()))
        self.chance[where] = pairs / tokens / len(self.heat[where])
        if tokens == seqs and self.tokens[where][2] >= 3:
            self._learn(where, chosen, pairs)
        for i, keep in enumerate(KEEPS):
            fade = keep if tokens == seqs else keep ** (tokens / seqs)
            gain = (1.0 - fade) / (1.0 - keep)
            self.tokens[where][i] = self.tokens[where][i] * fade + gain
            for e, heat in enumerate(self.heat[where]):
                heat[i] = heat[i] * fade + gain * (chosen.get(e, 0) / tokens)

    def _learn(self, where: tuple[str, int], chosen: dict[int, int], pairs: float) -> None:
        shares, tokens, learnt = self.shares[where], self.tokens[where], [0.0] * 4
        for e in sorted(chosen):
            by = [self.heat[where][e][i] * (shares[i] / tokens[i]) for i in range(3)] + [shares[3] * self.chance[where]]
            part = chosen[e] / pairs / (by[0] + by[1] + by[2] + by[3])
            learnt = [x + y * part for x, y in zip(learnt, by, strict=True)]
        self.shares[where] = [x * 0.95 + y * 0.05 for x, y in zip(shares, learnt, strict=True)]
        self.shares[where][3] = max(self.shares[where][3], 1e-6)
