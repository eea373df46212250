"""The shape of the package: which module may import which, what is light, how long files are, what is forbidden."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "sao"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Layers from top to bottom. A module imports from its own folder and from lower layers only; the folders of one layer
# do not know each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"runtime", "measure"},
    {"report"},
    {"generator", "broker", "learner"},
    {"agents"},
    {"rollout"},
    {"engines"},
    {"transport", "envs", "algorithms", "telemetry"},
    {"embed", "config"},
    {"storage"},
    {"trajectory"},
    {"errors"},
    {"_core"},
]
MAY_IMPORT_TORCH = ("engines/", "rollout/", "generator/", "learner/", "algorithms/")
MAY_IMPORT_TORCH += (
    "transport/weights.py",
    "storage/adapter_folder.py",
    "storage/model_folder.py",
    "runtime/evaluate.py",
    "runtime/model_check.py",
    "measure/parts.py",
)
FORBIDDEN_NAMES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def part(module: str) -> str:
    """`sao.broker.tasks` -> `broker`."""
    return module.split(".")[1]


def module_of(path: Path) -> str:
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(name for name in names if name != "__init__")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import, also those inside functions; `from sao import x` counts as `sao.x`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            found += (
                [(node.lineno, f"sao.{alias.name}") for alias in node.names]
                if module == "sao"
                else [(node.lineno, module)]
            )
    return found


def level(name: str) -> int:
    (index,) = [index for index, layer in enumerate(LAYERS) if name in layer]
    return index


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    mine = module_of(path)
    if mine == "sao":  # the public names, imported when they are first used
        return
    for line, module in imports(path):
        if not module.startswith("sao.") or module == "sao.__version__" or part(module) == part(mine):
            continue
        assert level(part(module)) > level(part(mine)), f"{path}:{line}: {mine} must not import {module}"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions, under `TYPE_CHECKING` and within a folder count."""
    graph = {module_of(path): set[str]() for path in SOURCES}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [member if member in graph else node.module for member in members]
            else:
                continue
            graph[module_of(path)] |= {name for name in names if name in graph and name != "sao"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_is_imported_only_where_tensors_are(path):
    place = path.relative_to(PACKAGE).as_posix()
    if place.startswith(MAY_IMPORT_TORCH):
        return
    heavy = {"torch", "transformers", "vllm"}
    found = [(line, module) for line, module in imports(path) if module.split(".")[0] in heavy]
    found += [(line, module) for line, module in imports(path) if module == "safetensors.torch"]
    wrong = [f"{path}:{line}: {module}" for line, module in found]
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_executes_what_it_reads(path):
    tree = ast.parse(path.read_text())
    wrong = [f"{line}: {module}" for line, module in imports(path) if module.split(".")[0] in FORBIDDEN_NAMES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in ("recv_pyobj", "send_pyobj", "unsafe_load"):
                wrong.append(f"{node.lineno}: {node.attr}")
            if node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id in ("yaml", "torch"):
                wrong.append(f"{node.lineno}: {node.value.id}.load")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            wrong.append(f"{node.lineno}: {node.func.id}(")
    assert not wrong, f"{path}: {wrong}"


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded by a statement in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


HEAVY = {"torch", "transformers", "vllm", "matplotlib", "tensorboard", "wandb", "prometheus_client", "dygraphs"}
HEAVY |= {"reasoning_gym", "trackio"}
LIGHT = [
    "import sao.cli",
    "import sao.config",
    "import sao.runtime.train",
    "import sao.runtime.supervisor, sao.runtime.doctor, sao.runtime.preflight",
    "import sao.broker.broker",
    "import sao.telemetry.monitor, sao.telemetry.plot, sao.report.page",
    "import sao.transport.client, sao.transport.actor",
    "import sao.trajectory, sao.embed.buffer, sao.storage.checkpoints",
    "import sao.envs.registry",
    "from sao import TrajectoryBuffer, pack, plan, advantages, VersionClock",
]


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[-2] in ("learner", "algorithms")], ids=lambda p: p.name)
def test_nothing_that_trains_encodes_text(path):
    """Token ids of the engine are the only ones: a learner without a tokenizer cannot make others from text."""
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    names |= {name.rpartition(".")[2] for _, name in imports(path)}
    assert not names & {"AutoTokenizer", "PreTrainedTokenizerFast", "tokenizers", "Renderer", "apply_chat_template"}


@pytest.mark.parametrize("statement", LIGHT)
def test_light_modules_import_nothing_heavy(statement):
    assert not modules_after(statement) & HEAVY


def test_import_sao_brings_only_the_standard_library():
    loaded = modules_after("import sao")
    foreign = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    foreign -= modules_after("pass")  # what the interpreter's own start brings (editable installs, ...)
    assert foreign == {"sao"}


@pytest.mark.parametrize(("pattern", "limit"), [("*.py", 500), ("*.pyi", 500), ("*.rs", 800)])
def test_files_are_short(pattern, limit):
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    long = {name: n for name in listed.split() if (n := len((ROOT / name).read_text().splitlines())) > limit}
    assert not long, f"over {limit} lines: {long}"


def test_an_actor_is_small():
    assert len((PACKAGE / "transport" / "actor.py").read_text().splitlines()) < 200


def test_public_names_are_all_there():
    import sao

    assert {name for name in sao.__all__ if not hasattr(sao, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sao.nonsense  # noqa: B018


def test_every_public_thing_has_a_docstring():
    bare = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        places = [(path, tree)]
        places += [
            (path, node)
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for _, node in places:
            name = getattr(node, "name", path.stem)
            if not name.startswith("_") and not ast.get_docstring(node) and path.read_text().strip():
                bare.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {name}")
    assert not bare


def test_every_key_of_the_configuration_is_read_somewhere():
    from sao.config import Config

    text = "\n".join(path.read_text() for path in SOURCES if path.parent.name != "config" or path.stem == "run")
    unread = [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields
        if not re.search(rf"\.{key}\b", text)
    ]
    only_off_is_legal = {"sampling.top_p", "sampling.top_k", "sampling.repetition_penalty"}
    read_by_the_configuration = {"algorithm.preset"}
    assert set(unread) <= only_off_is_legal | read_by_the_configuration


def rust_modules(source: Path) -> dict[str, set[str]]:
    """Which module of a Rust crate names which others: {module: modules}, tests and inline paths included.

    A file is a module, one in a folder too; a name counts for the deepest module on its path, so what a parent
    re-exports counts for the parent.
    """
    files = {}
    for path in sorted(source.rglob("*.rs")):
        names = path.relative_to(source).with_suffix("").parts
        files[() if names == ("lib",) else names] = re.sub(r"//[^\n]*|\"(\\.|[^\"\\])*\"", "", path.read_text())
    found: dict[str, set[str]] = {}
    for own, text in files.items():
        inline = [(m.start(), closing(text, m.end() - 1), m[1]) for m in re.finditer(r"\bmod (\w+) \{", text)]
        children = [names[-1] for names in files if names[:-1] == own and names != own]
        starts = r"(?<![\w:])(crate|super|self" + "".join(f"|{child}" for child in children) + r")::"
        others = set()
        for match in re.finditer(starts, text):
            here = own + tuple(name for begin, end, name in inline if begin < match.start() < end)
            for path in leaves(text, match.start()):
                base = here
                while path and path[0] in ("crate", "super", "self"):
                    base = {"crate": (), "super": base[:-1], "self": base}[path[0]]
                    path = path[1:]
                whole = (*base, *path)
                others.add(next(whole[:n] for n in range(len(whole), -1, -1) if whole[:n] in files))
        found["::".join(own) or "lib"] = {"::".join(other) or "lib" for other in others - {own}}
    return found


def closing(text: str, at: int) -> int:
    """Where the brace that opens at `at` is closed."""
    depth = 0
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise AssertionError("a brace is not closed")


def leaves(text: str, at: int) -> list[tuple[str, ...]]:
    """The paths of a Rust use tree or of a plain path: `a::{b, c::{d}}` -> a::b, a::c::d."""
    head = re.compile(r"\s*(\w+)?").match(text, at)
    assert head is not None
    name, rest = ((head[1],) if head[1] else ()), head.end()
    if text[rest : rest + 2] != "::":
        return [name]
    if text[rest + 2] != "{":
        return [(*name, *leaf) for leaf in leaves(text, rest + 2)]
    found, begin, depth = [], rest + 3, 0
    for index in range(begin, closing(text, rest + 2) + 1):
        if depth == 0 and text[index] in ",}":
            found += [(*name, *leaf) for leaf in leaves(text, begin)]
            begin = index + 1
        depth += {"{": 1, "}": -1}.get(text[index], 0)
    return found


@pytest.mark.parametrize("crate", ["core", "python"])
def test_rust_modules_have_no_circles(crate):
    modules = rust_modules(ROOT / "rust" / crate / "src")
    assert len(modules) > 5 and any(modules.values())
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError, which names a circle


def test_what_a_rust_module_names_is_found(tmp_path):
    for name, text in {
        "lib.rs": "pub mod a;\nmod b;\npub use a::Thing;\n",
        "a.rs": 'use crate::{b::c::{self, D}, e};\nmod inline {\n    use super::x;\n}\nlet s = "crate::b";\n',
        "b.rs": "mod c;\nuse c::D; // crate::e\n",
        "b/c.rs": "fn f() -> super::super::a::Thing { self::g() }\n",
        "e.rs": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = rust_modules(tmp_path)
    assert found == {"lib": {"a"}, "a": {"b::c", "e"}, "b": {"b::c"}, "b::c": {"a"}, "e": set()}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(found).prepare()
