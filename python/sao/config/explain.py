"""Turns pydantic's validation errors into one line a fault: field, what is wrong, value, what was expected."""

import copy
import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

Location = tuple[Any, ...]
NEAR = 0.75  # similarity from which a name is worth suggesting
MOVED = {  # keys that are gone -> what to do instead
    "staleness.discipline": "use staleness.order",
    "learner.lr_warmup_steps": "use learner.policy_lr_warmup_steps and learner.critic_lr_warmup_steps",
    "generator.engines": "use generator.count: a generator has one engine",
}
PASSES = 4  # unknown keys and wrong values, missing fields, combinations in a section, combinations of sections


def explain(model: type[BaseModel], data: dict[str, Any]) -> list[str]:
    """All faults of `data` under `model` (sections of plain fields), in order of discovery; empty if there is none.

    A wrong field hides the checks that compare several fields, so its default is put in its place and those are
    looked at too; a later fault that only repeats a field already named is left out.
    """
    found: dict[str, list[str]] = {}
    rest = copy.deepcopy(data)
    for _ in range(PASSES):
        try:
            model.model_validate(rest)
            break
        except ValidationError as error:
            faults, wrong = _describe(model, error)
        for field, texts in faults.items():
            if field not in found:
                told = [text for text in texts if not any("." in known and known in text for known in found)]
                found |= {field: told} if told else {}
        for location, missing in wrong:
            _mend(rest, location, missing)
    return [text for texts in found.values() for text in texts]


def _describe(
    model: type[BaseModel], error: ValidationError
) -> tuple[dict[str, list[str]], list[tuple[Location, bool]]]:
    faults: dict[str, list[str]] = {}
    wrong: list[tuple[Location, bool]] = []
    for item in error.errors():
        at = item["loc"]
        location = (*at[:2], *(part for part in at[2:] if isinstance(part, int)))  # without names of union members
        where = ".".join(str(part) for part in location)
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        message = message.replace("String should match pattern", "must match")
        if item["type"] == "value_error" and len(location) > 1:  # of one field
            faults.setdefault(where, []).append(f"{where}: {message}")
            wrong.append((location, False))
            continue
        if item["type"] == "value_error":  # of a validator that compares fields: one line a fault, "field: text"
            for line in message.splitlines():
                text = f"{where}.{line}" if where else line
                faults.setdefault(text.partition(": ")[0], []).append(text)
            if location:
                wrong.append((location, False))
            continue
        wrong.append((location, item["type"] == "missing"))
        about = _description(model, location)
        if item["type"] == "extra_forbidden":
            kind = "section" if len(location) == 1 and isinstance(item["input"], dict) else "key"
            message = f"unknown {kind}{_suggestion(model, location)}"
        elif item["type"] == "missing":
            if len(location) == 1:  # a whole section: the next pass names the fields in it that are required
                continue
            message = f"required, not given{about}"
        elif where in faults:  # the other member of a union
            before, got, after = faults[where][-1].partition(" (got ")
            faults[where][-1] = f"{before} or {message.removeprefix('must be ')}{got}{after}"
            continue
        else:
            message = f"{message} (got {item['input']!r}){about}"
        faults[where] = [f"{where}: {message}"]
    return faults, wrong


def _suggestion(model: type[BaseModel], location: Location) -> str:
    """The nearest known name for an unknown key: exactly that name elsewhere, then its own section, then anywhere."""
    if instead := MOVED.get(".".join(map(str, location))):
        return f"; {instead}"
    name = str(location[-1]).replace("-", "_")
    sections = {section: list(_section(model, section)) for section in model.model_fields}
    own = list(sections) if len(location) == 1 else sections.get(location[0], [])
    home = [section for section, keys in sections.items() if name in keys]
    near = difflib.get_close_matches(name, own, n=1, cutoff=NEAR)
    if near and (near[0] == name or not home):
        return f"; did you mean {near[0]}?"
    if home:
        return f"; it belongs to [{home[0]}]"
    anywhere = {key: section for section, keys in sections.items() for key in keys}
    near = difflib.get_close_matches(name, list(anywhere), n=1, cutoff=NEAR)
    return f"; did you mean {near[0]} of [{anywhere[near[0]]}]?" if near else ""


def _section(model: type[BaseModel], name: Any) -> dict[str, Any]:
    field = model.model_fields.get(name)
    return dict(field.annotation.model_fields) if field is not None else {}  # type: ignore[union-attr]


def _description(model: type[BaseModel], location: Location) -> str:
    field = _section(model, location[0]).get(location[1]) if len(location) > 1 else None
    return f"; {field.description}" if field is not None and field.description else ""


def _mend(data: dict[str, Any], location: Location, missing: bool) -> None:
    """Removes a wrong value, so that its default holds, or puts in a stand-in for one that is missing."""
    section, *key = location[:2]
    table, name = (data.setdefault(section, {}), key[0]) if key else (data, section)
    if missing:
        table[name] = "-" if key else {}
    else:
        table.pop(name, None)
