"""What is measured, what came out, and the table and the file made of it.

Owns the names of tests, medians over rounds, the Markdown and the JSON. Must not know who measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """`kind` pp: a prompt of `tokens` up to its first logits; tg: `tokens` generated, by each of `batch` sequences. Both begin with
    `context` tokens in the KV cache."""

    kind: str
    tokens: int
    context: int = 0
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ {self.context}" if self.context else "") + (f" x {self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second of one contender in one round, all sequences together."""

    contender: str
    threads: int
    test: Case
    rate: float


@dataclass(slots=True)
class Report:
    """All rounds of one model. `read_gb_s`: by number of threads, what was measured in each round. `token_bytes`: by context, the bytes of
    weights and KV cache that a token of one sequence reads."""

    model: str
    about: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    read_gb_s: dict[int, list[float]] = field(default_factory=dict)
    token_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(result.contender for result in self.results))

    def rates(self, contender: str, threads: int, test: Case) -> list[float]:
        return [r.rate for r in self.results if (r.contender, r.threads, r.test) == (contender, threads, test)]

    def ratio(self, threads: int, test: Case) -> float | None:
        """The first contender's median over the second one's, where both ran."""
        both = [self.rates(name, threads, test) for name in self.contenders[:2]]
        return median(both[0]) / median(both[1]) if len(both) == 2 and all(both) else None

    def share_of_bandwidth(self, threads: int, test: Case) -> float | None:
        """Of the memory's read speed, how much the first contender's decoding used; None for what reads weights for several tokens."""
        mine = self.rates(self.contenders[0], threads, test)
        if test.kind != "tg" or test.batch > 1 or not mine or test.context not in self.token_bytes or threads not in self.read_gb_s:
            return None
        return median(mine) * self.token_bytes[test.context] / (median(self.read_gb_s[threads]) * 1e9)

    def markdown(self) -> str:
        """A table of medians, with the range of the rounds, and under it the bandwidth it was measured at."""
        head = ["test", "threads", *(f"{name}, tok/s" for name in self.contenders), *(["ratio"] if len(self.contenders) > 1 else [])]
        lines = ["| " + " | ".join([*head, "of read bandwidth"]) + " |", "|" + "---|" * (len(head) + 1)]
        for test in dict.fromkeys(result.test for result in self.results):
            for threads in dict.fromkeys(result.threads for result in self.results):
                cells = [str(test), str(threads), *(_range(self.rates(name, threads, test)) for name in self.contenders)]
                if len(self.contenders) > 1:
                    ratio = self.ratio(threads, test)
                    cells.append("" if ratio is None else f"**{ratio:.2f}**")
                share = self.share_of_bandwidth(threads, test)
                lines.append("| " + " | ".join([*cells, "" if share is None else f"{100 * share:.0f} %"]) + " |")
        speeds = ", ".join(f"{median(values):.1f} GB/s on {n} thread{'s' if n > 1 else ''}" for n, values in self.read_gb_s.items())
        return "\n".join(lines) + (f"\n\nMemory read in the same rounds: {speeds}." if speeds else "")

    def save(self, path: Path) -> None:
        document = {
            "model": self.model,
            **self.about,
            "read_gb_s": self.read_gb_s,
            "token_bytes": self.token_bytes,
            "rounds": [{**asdict(result.test), "contender": result.contender, "threads": result.threads, "rate": result.rate}
                       for result in self.results],
        }  # fmt: skip
        path.write_text(json.dumps(document, indent=1) + "\n")


def load(path: Path) -> Report:
    """A report that `save` wrote."""
    document = json.loads(path.read_text())
    results = [
        Result(row["contender"], row["threads"], Case(row["kind"], row["tokens"], row["context"], row["batch"]), row["rate"])
        for row in document.pop("rounds")
    ]
    read, sizes = ({int(key): value for key, value in document.pop(name).items()} for name in ("read_gb_s", "token_bytes"))
    return Report(document.pop("model"), document, results, read, sizes)


def _range(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else ""
