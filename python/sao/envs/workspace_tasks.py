"""The tasks of `workspace`: a small package whose modules disagree with the rules in its documentation."""

import random
from collections.abc import Callable
from dataclasses import dataclass

MODULES = ("bonus", "customs", "deposit", "freight", "handling", "insurance", "levy", "packing", "rebate", "storage")
FUNCTIONS = ("charge", "apply", "settle", "assess")
_SIGNS = ("lorry", "parcel", "pallet", "crate", "drum", "envelope")


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of a module, over whole numbers `amount` and `count`: in Python, in English, and the right result."""

    expression: str
    text: str
    of: Callable[[int, int], int]


def _rule(rng: random.Random) -> Rule:
    form = rng.randrange(3)
    b = (rng.randint(2, 19), rng.randint(3, 8), rng.randint(50, 997))[form]
    a, c = rng.randint(2, 19), rng.randint(1, 99)
    return (
        Rule(
            f"amount * {a} + count * {b} - {c}",
            f"Multiply the amount by {a}, add {b} for every piece of the count, then take {c} off.",
            lambda amount, count: amount * a + count * b - c,
        ),
        Rule(
            f"amount + {a} if count >= {b} else amount - {c}",
            f"From a count of {b} pieces on, add {a} to the amount; below that, take {c} off.",
            lambda amount, count: amount + a if count >= b else amount - c,
        ),
        Rule(
            f"(amount * {a} + count) % {b} + {c}",
            f"Multiply the amount by {a} and add the count; keep the remainder after division by {b}; then add {c}.",
            lambda amount, count: (amount * a + count) % b + c,
        ),
    )[form]


@dataclass(frozen=True, slots=True)
class Call:
    """One hidden test: a function of a module, its arguments and what it has to return."""

    module: str
    function: str
    arguments: tuple[int, int]
    expected: int


@dataclass(frozen=True, slots=True)
class RepositoryTask:
    """A repository at its start, by path; the rules that hold, in the order of `package/total.py`; hidden tests; and
    what every module's function has to be called."""

    package: str
    function: str
    rules: dict[str, Rule]
    files: dict[str, str]
    calls: tuple[Call, ...]

    def solution(self) -> dict[str, str]:
        """The files that have to change, as they have to be. For scripted agents and tests; no policy sees it."""
        right = {
            f"{self.package}/{name}.py": _module(name, self.function, rule.expression)
            for name, rule in self.rules.items()
        }
        return {**right, f"{self.package}/total.py": _total(self.package, list(self.rules), self.function)}


def draw(rng: random.Random, modules: int) -> RepositoryTask:
    """A task with so many modules, 2 to 10."""
    package = f"{rng.choice(_SIGNS)}{rng.randrange(1000)}"
    names, old, new = rng.sample(MODULES, modules), *rng.sample(FUNCTIONS, 2)
    rules = {name: _rule(rng) for name in names}
    files = {f"{package}/__init__.py": "", "docs/order.md": _order(names, old, new)}
    for name in names:
        past = [_rule(rng) for _ in range(3)]
        files[f"docs/{name}.md"] = _history(name, past, rules[name])
        files[f"{package}/{name}.py"] = _module(name, old, past[-1].expression)
    files[f"{package}/total.py"] = _total(package, sorted(names), old)
    calls = []
    for _ in range(6):
        amount, count = rng.randint(0, 5000), rng.randint(0, 12)
        total = amount
        for name, rule in rules.items():
            calls.append(Call(f"{package}.{name}", new, (amount, count), rule.of(amount, count)))
            total = rule.of(total, count)
        calls.append(Call(f"{package}.total", "total", (amount, count), total))
    return RepositoryTask(package, new, rules, files, tuple(calls))


def _module(name: str, function: str, expression: str) -> str:
    return (
        f'"""{name.capitalize()}: see docs/{name}.md."""\n\n\ndef {function}(amount: int, count: int) -> int:\n'
        f'    """The amount after {name}, in cents."""\n    return {expression}\n'
    )


def _total(package: str, names: list[str], function: str) -> str:
    steps = "".join(f"    amount = {name}.{function}(amount, count)\n" for name in names)
    return (
        f'"""Everything that is due: see docs/order.md."""\n\nfrom {package} import {", ".join(sorted(names))}\n\n\n'
        f'def total(amount: int, count: int) -> int:\n    """The amount after all modules, in cents."""\n'
        f"{steps}    return amount\n"
    )


def _history(name: str, past: list[Rule], present: Rule) -> str:
    years = enumerate(past, 2026 - len(past))
    old = "".join(f"## Until {year}\n\n{rule.text} No longer in force.\n\n" for year, rule in years)
    return f"# {name.capitalize()}\n\n{old}## In force\n\n{present.text}\n"


def _order(names: list[str], old: str, new: str) -> str:
    lines = "".join(f"{place}. {name}\n" for place, name in enumerate(names, 1))
    return f"# Order and names\n\nThe function of every module is called `{new}`, no longer `{old}`.\n\n{lines}"
