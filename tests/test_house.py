"""The house rules: layers, imports, sizes and names, checked on every file of the package."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

import aiocoll
import aiocoll.distributed

from . import public_names
from .layers import HOUSES, LAYERS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aiocoll"
FILES = sorted(PACKAGE.rglob("*.py"))

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Largest number of code lines in a file, without docstrings, comments and blank lines.
MAX_CODE = 600
MAX_FUNCTION = 70
#: Largest number of parameters of a function, except `self`, `*args` and `**kwargs`.
MAX_PARAMETERS = 7
#: Largest number of public methods that a class defines, properties included.
MAX_METHODS = 25

#: Functions that may have more parameters, with their public names. Programs pass most of these parameters by keyword.
#: `init_process_group` has the signature of torch's function.
PUBLIC_SIGNATURES = {
    "distributed.world.init_process_group": "aiocoll.distributed.init_process_group",
    "rendezvous.new_group.new_group.__init__": "aiocoll.new_group",
    "store.server.StoreServer.__init__": "aiocoll.store.StoreServer",
    "store.tcp.TCPStore.__init__": "aiocoll.TCPStore",
}
#: Classes that may have more public methods: `ProcessGroup` has a method for every kind of call, and `Endpoint` holds
#: all objects of a rank.
LARGE_CLASSES = {"group.process_group.ProcessGroup", "engine.endpoint.Endpoint"}

#: Heavy packages that `import aiocoll` must not load.
HEAVY = ("torch", "cupy", "ml_dtypes", "jax", "scipy", "pytest", "uvloop", "redis", "prometheus_client",
         "opentelemetry")  # fmt: skip

#: Modules that `import aiocoll` must not load: few programs need them, and importing each takes 1 ms or more.
LATER = ("aiocoll.cli", "aiocoll.codec.records", "aiocoll.arrays", "aiocoll.elements.sparse", "aiocoll.gpu",
         "aiocoll.group.sparse_reduce", "aiocoll.redis", "aiocoll.testing", "argparse", "decimal", "email", "fractions",
         "http", "json", "multiprocessing", "tempfile", "urllib.request", "uuid", "xml", "zoneinfo")  # fmt: skip


def module(path: Path) -> str:
    """Return the dotted module name of a file, without the prefix `aiocoll.`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "aiocoll"


MODULES = {module(path): path for path in FILES}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def all_nodes(name: str) -> list[ast.AST]:
    """Return all syntax nodes of a module."""
    return list(ast.walk(tree(name)))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def without_types(name: str) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a module, except the code below `if TYPE_CHECKING`."""
    left: list[ast.AST] = [tree(name)]
    while left:
        yield (node := left.pop())
        left += [child for child in ast.iter_child_nodes(node) if not is_type_checking(child)]


@cache
def imports(name: str, *, types: bool = True) -> frozenset[str]:
    """Return the modules of the package that the module `name` imports, without the prefix `aiocoll.`."""
    found = set()
    for node in all_nodes(name) if types else without_types(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: import by the absolute name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("aiocoll.") in MODULES else str(node.module))
    return frozenset(f.removeprefix("aiocoll.") for f in found if f.split(".")[0] == "aiocoll")


def folder(name: str) -> str:
    return name.split(".")[0]


def inner_folder(name: str) -> str:
    """Return the folder of a module; for a top-level module, return its own name."""
    return name if MODULES[name].name == "__init__.py" or "." not in name else name.rpartition(".")[0]


def functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in all_nodes(name) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def qualified_definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, node) of all functions and classes inside a syntax node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}.{child.name}", child
            yield from qualified_definitions(child, f"{prefix}.{child.name}")
        else:
            yield from qualified_definitions(child, prefix)


def test_every_module_belongs_to_a_layer() -> None:
    assert {folder(name) for name in MODULES} == LEVEL.keys(), "add the module to the table in docs/architecture.md"


#: Allowed imports from a higher layer, below `if TYPE_CHECKING` only: (importing module, imported module).
PUBLIC_FROM_ABOVE = {("store", "redis.store")}


def test_module_imports_only_lower_layers() -> None:
    assert not {pair for pair in PUBLIC_FROM_ABOVE if pair[1] in imports(pair[0], types=False)}
    wrong = [
        f"{name} imports {each}, which is not below it"
        for name in MODULES
        for each in sorted(imports(name))
        if folder(each) != folder(name) and LEVEL[folder(each)] >= LEVEL[folder(name)]
        if (name, each) not in PUBLIC_FROM_ABOVE
    ]
    assert not wrong, "\n".join(wrong)


#: Names of devices, array libraries and tools. Only edge modules may use these names in identifiers and literals.
EDGE_WORD = re.compile(r"cuda|nccl|cupy|torch|redis|(?<![a-z])(ray|dask|jax)(?![a-z])", re.IGNORECASE)
#: Exceptions to `EDGE_WORD`: patterns of base and core modules that may use such names, each with the reason.
NAMES_OF_THE_EDGE = {
    "backends": "Backend.NCCL, and the remedy for names of torch's backends: programs for torch.distributed use them",
    "typing": "SupportsCudaArrayInterface is a public protocol, which type checkers have to see",
    "rendezvous.launchers": "the environment variables of torchrun",
    "store": "the public name RedisStore, loaded from the edge on first use",
}


def edge_imports(name: str) -> set[str]:
    """Return the edge modules that a module imports anywhere: at the top, in functions, or for type checkers."""
    return {each for each in imports(name) if folder(each) in HOUSES["edge"]}


def edge_words(module: ast.AST) -> set[str]:
    """Return the identifiers and literals of a module that match `EDGE_WORD`, except docstrings."""
    documentation = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words = set()
    for node in ast.walk(module):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                words.add(text)
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                words.add(text)
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                words.add(text)
            case ast.alias(name=text, asname=other):
                words |= {text, other or ""}
            case ast.ImportFrom(module=str(text)):
                words.add(text)
            case ast.ExceptHandler(name=str(text)) | ast.MatchAs(name=str(text)) | ast.MatchStar(name=str(text)):
                words.add(text)
            case ast.MatchMapping(rest=str(text)):
                words.add(text)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                words |= {*names}
    return {word for word in words if EDGE_WORD.search(word)}


def test_base_and_core_modules_do_not_import_edge_modules() -> None:
    assert HOUSES["base"] | HOUSES["core"] | HOUSES["edge"] == LEVEL.keys()
    inside = [name for name in MODULES if folder(name) not in HOUSES["edge"]]
    allowed = {name: {other} for name, other in PUBLIC_FROM_ABOVE}
    assert not {
        f"{name} imports {found}" for name in inside if (found := edge_imports(name) - allowed.get(name, set()))
    }
    base = [name for name in inside if folder(name) in HOUSES["base"]]
    assert not {f"{name}: {each}" for name in base for each in imports(name) if folder(each) not in HOUSES["base"]}


def test_base_and_core_modules_name_no_device_array_library_or_tool() -> None:
    found = {
        name: words for name in MODULES if folder(name) not in HOUSES["edge"] and (words := edge_words(tree(name)))
    }
    assert not {
        name: words for name, words in found.items() if not any(re.fullmatch(e, name) for e in NAMES_OF_THE_EDGE)
    }
    unused = {pattern for pattern in NAMES_OF_THE_EDGE if not any(re.fullmatch(pattern, name) for name in found)}
    assert not unused, "unused exceptions: remove them"


@pytest.mark.parametrize(
    "planted",
    [
        "def f():\n    from aiocoll.gpu.provider import runtime",
        "if TYPE_CHECKING:\n    import aiocoll.gpu.provider",
        "def f(x):\n    return x.is_cuda",
        "def f(x):\n    return sys.modules.get('torch')",
        "def f(*, nccl_only): ...",
        "f(jax=1)",
        "class CupyView: ...",
        "x = f'on CUDA device {n}'",
    ],
)
def test_edge_name_check_reports_planted_references_to_edge_modules(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edge_words(ast.parse(planted)) or "aiocoll.gpu" in planted
    assert not edge_words(ast.parse('def array(arrays, stray, relax):\n    """Return a torch tensor."""'))
    if "aiocoll.gpu" in planted:
        monkeypatch.setitem(MODULES, "group.planted", PACKAGE / "group" / "planted.py")
        monkeypatch.setattr(sys.modules[__name__], "tree", lambda name: ast.parse(planted))
        all_nodes.cache_clear()
        imports.cache_clear()
        try:
            assert edge_imports("group.planted") == {"gpu.provider"}
        finally:
            all_nodes.cache_clear()
            imports.cache_clear()


def test_algorithms_import_only_the_standard_library() -> None:
    for name in MODULES:
        if folder(name) == "algorithms":
            assert {folder(each) for each in imports(name)} <= {"algorithms"}, name
            foreign = {
                node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                for node in all_nodes(name)
                if isinstance(node, ast.Import | ast.ImportFrom)
            }
            assert {str(f).split(".")[0] for f in foreign} <= sys.stdlib_module_names | {"aiocoll"}, name


def in_cycles(graph: Mapping[str, Set[str]]) -> set[str]:
    """Return the nodes of a directed graph that are part of a cycle."""

    def reached(start: str) -> set[str]:
        found, todo = set[str](), [start]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        return found

    return {node for node in graph if node in reached(node)}


def test_modules_have_no_import_cycles() -> None:
    """Exempt imports below `if TYPE_CHECKING`, which may form cycles."""
    graph = {name: imports(name, types=False) - {name} for name in MODULES}
    assert not in_cycles(graph)


def test_folders_have_no_import_cycles() -> None:
    """Check each folder: imports between its modules and subfolders must form no cycle."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for name in MODULES:
        for other in imports(name, types=False):
            one, two = name.split("."), other.split(".")
            depth = next((at for at, (mine, its) in enumerate(zip(one, two, strict=False)) if mine != its), None)
            if depth is not None:
                graph = graphs.setdefault(".".join(one[:depth]), {})
                graph.setdefault(one[depth], set()).add(two[depth])
                graph.setdefault(two[depth], set())
    assert {"", "engine", "group"} <= graphs.keys()
    assert not {f"{place}: {found}" for place, graph in graphs.items() if (found := in_cycles(graph))}


def test_engine_imports_no_concrete_transport() -> None:
    """Refuse imports from subfolders of `transport` and from `transport.memory`, which are the concrete transports."""
    engine = {i for name in MODULES if folder(name) == "engine" for i in imports(name) if folder(i) == "transport"}
    assert engine
    assert not {i for i in engine if i.count(".") > 1 or i == "transport.memory"}


def code_lines(name: str) -> int:
    """Return the number of code lines in a module, without docstrings, comments and blank lines."""
    documented: set[int] = set()
    for node in all_nodes(name):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    text = MODULES[name].read_text()
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in blank]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented)


def test_files_and_functions_have_a_limited_length() -> None:
    for name in MODULES:
        assert code_lines(name) <= MAX_CODE, name
        for function in functions(name):
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
            assert lines <= MAX_FUNCTION, f"{name}.{function.name} has {lines} lines"


def parameters(node: ast.AST) -> int:
    """Return the number of parameters of a function, without `self` and `cls`."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_have_few_parameters() -> None:
    """Exempt the public functions in `PUBLIC_SIGNATURES`."""
    public = (ROOT / "tests" / "public_names.txt").read_text()
    assert not {name for name in PUBLIC_SIGNATURES.values() if f"\n{name}(" not in public}
    many = {
        name
        for each in MODULES
        for name, node in qualified_definitions(tree(each), each)
        if not isinstance(node, ast.ClassDef) and parameters(node) > MAX_PARAMETERS
    }
    assert many == PUBLIC_SIGNATURES.keys()


def public_methods(node: ast.ClassDef) -> set[str]:
    """Return the public methods and properties that a class defines, except tests in contract classes."""
    methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in methods if not each.name.startswith(("_", "test_"))}


def test_classes_have_few_public_methods() -> None:
    """Exempt the classes in `LARGE_CLASSES`."""
    found = {
        name: len(public_methods(node))
        for each in MODULES
        for name, node in qualified_definitions(tree(each), each)
        if isinstance(node, ast.ClassDef)
    }
    assert found.keys() >= LARGE_CLASSES
    assert not {name: count for name, count in found.items() if count > MAX_METHODS and name not in LARGE_CLASSES}


@cache
def classes() -> dict[str, type]:
    """Return all top-level classes of the package by name; skip modules that need CuPy, Ray, Dask or torch."""
    left = ("aiocoll", "__main__", "gpu.cupy_api", "torch")
    names = [name for name in MODULES if name not in left and folder(name) != "integrations"]
    found: dict[str, type] = {}
    for name in names:
        loaded = importlib.import_module(f"aiocoll.{name}")
        tops = [node.name for node in tree(name).body if isinstance(node, ast.ClassDef)]
        found.update({f"{name}.{each}": getattr(loaded, each) for each in tops})
    return found


def ancestors(cls: type) -> dict[str, type]:
    """Return all direct and indirect bases in the package, by name, except protocols and exceptions."""
    plain = [base for base in cls.__mro__[1:] if not (issubclass(base, BaseException) or is_protocol(base))]
    return {
        name: base
        for base in plain
        if (name := f"{base.__module__}.{base.__name__}".removeprefix("aiocoll.")) in classes()
    }


def is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


def test_classes_have_at_most_two_bases() -> None:
    """Allow two direct bases and four bases in total; protocols and exceptions do not count."""
    names = {cls: name for name, cls in classes().items()}
    direct = {
        name: [base for base in cls.__bases__ if names.get(base) in ancestors(cls)] for name, cls in classes().items()
    }
    assert not {name for name, bases in direct.items() if len(bases) > 2}
    assert not {name for name, cls in classes().items() if len(ancestors(cls)) > 4}


def test_operation_classes_take_at_most_five_constructor_arguments() -> None:
    (operation,) = (cls for name, cls in classes().items() if name.endswith(".Operation"))
    found = {
        name
        for name, cls in classes().items()
        if issubclass(cls, operation) and len(inspect.signature(cls).parameters) > 5
    }
    assert not found


class Attributes:
    """The attributes that the source of a class declares and sets.

    Attributes:
        declared: attributes declared at the top of the class.
        bare: declared attributes without a value.
        own: attributes declared here, also by `__slots__`, whether or not a base declares them.
        set: attributes that its methods set on `self`.
    """

    def __init__(self, node: ast.ClassDef) -> None:
        self.declared: set[str] = set()
        self.bare: set[str] = set()
        self.own: set[str] = set()
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self.declared.add(statement.target.id)
                if statement.value is None and "ClassVar" not in ast.unparse(statement.annotation):
                    self.bare.add(statement.target.id)
            elif isinstance(statement, ast.Assign):
                names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
                self.declared |= names
                if names == {"__slots__"}:
                    self.own |= set(ast.literal_eval(statement.value))
        self.own |= self.declared
        self.set = {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
        }


def test_attributes_are_declared_in_the_file_that_sets_them() -> None:
    texts = {
        f"{name}.{node.name}": Attributes(node)
        for name in MODULES
        for node in tree(name).body
        if isinstance(node, ast.ClassDef)
    }
    found = set()
    for name, cls in classes().items():
        for base, base_class in ancestors(cls).items():
            if base_class.__module__ != cls.__module__:
                elsewhere = texts[base].declared | texts[base].set
                found |= {f"{name}.{attribute}" for attribute in (texts[name].set - texts[name].own) & elsewhere}
        if not (is_protocol(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, tuple)):
            stored = {
                node.attr
                for node in all_nodes(name.rpartition(".")[0])
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
            # Check only private attributes, since other modules may set the public ones.
            found |= {f"{name}.{each}" for each in texts[name].bare - stored if each.startswith("_")}
    assert not found


#: Exceptions: private attributes of foreign objects, by the module that uses them. Either a foreign package has no
#: public equivalent, or the class is public and hides these attributes from users.
FOREIGN = {
    "cli.start": {"_run_module_as_main"},  # of runpy
    "arrays.torch_sparse": {"_indices", "_values"},  # of torch, for tensors that are not coalesced
    "group.lifetime": {"_settle"},  # of the flight recorder, which is public
    "integrations.torch.aio_backend": {
        "_device_types",
        "_get_backend",
        "_register_backend",
        "_set_default_backend",
        "_world",
    },  # of torch
    "integrations.torch.calls": {"_profiler_enabled", "_record_function_with_args_enter"},  # of torch
    "integrations.torch.rendezvous": {"_rendezvous_handlers"},  # of torch
    "integrations.torch.world": {"_get_backend"},  # of torch
    "integrations.torch.work": {"_record_function_with_args_exit"},  # of torch
    "group.parts": {"_parts"},  # the only access to the parts of a group
    "meeting.claim": {"_hold", "_sees_disconnects"},  # of stores, which users implement
    "redis.connection": {"_writer"},  # of redis
    "store.view": {"_call_checked"},  # of stores, too
    "testing.spawn": {"_testMethodName"},  # of unittest
    "testing.virtual": {"_callback", "_ready", "_scheduled", "_when"},  # of asyncio
}
#: Names with an underscore that are public methods and attributes of named tuples.
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def own_private_names(module: ast.AST) -> set[str]:
    """Return the private methods, attributes and slots that the classes of a module define."""
    found = set()
    for item in (item for node in ast.walk(module) if isinstance(node, ast.ClassDef) for item in ast.walk(node)):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(item.name)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            found.add(item.value)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            found.add(item.attr)
    return {name for name in found if name.startswith("_")}


def foreign_private_names(module: ast.AST) -> set[str]:
    """Return the private attributes that a module uses but does not define."""
    known = own_private_names(module) | NAMED_TUPLE
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and node.attr not in known
        and ast.unparse(node.value) not in {"self", "cls", "argparse", "asyncio", "os", "sys", "threading"}
    }


def private_uses_of_works(module: ast.AST) -> set[str]:
    """Return the uses of private `Work` and `Completion` attributes in a module, except uses on `self`."""
    names = {
        name for each in ("work", "completion") for name in own_private_names(tree(each)) if re.match("_[^_]", name)
    }
    return {
        ast.unparse(node)
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) != "self"
    }


def test_private_attributes_are_used_only_in_the_module_that_defines_them() -> None:
    found = {name: names for name in MODULES if (names := foreign_private_names(tree(name)))}
    assert found == FOREIGN


def test_private_attributes_of_works_and_completions_are_used_in_their_own_modules_only() -> None:
    assert "_completion" in own_private_names(tree("work"))
    found = {
        name: uses for name in MODULES.keys() - {"work", "completion"} if (uses := private_uses_of_works(tree(name)))
    }
    assert not found, "use `completion_of` and the public attributes of `Completion`"


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("def end(work):\n    work._value = None", {"_value"}),
        ("class Part:\n    def __init__(self, work):\n        self._own = work._withdraw", {"_withdraw"}),
        ("class Part:\n    __slots__ = ('_own',)\n    def f(self, part):\n        return part._own", set()),
        ("call._replace(key=None)", set()),
    ],
)
def test_check_of_private_attributes_finds_planted_uses_in_other_modules(planted: str, found: set[str]) -> None:
    assert foreign_private_names(ast.parse(planted)) == found


def test_check_of_private_attributes_finds_planted_uses_on_works() -> None:
    planted = "class Part:\n    def f(self, work):\n        self._completion = work._completion"
    assert private_uses_of_works(ast.parse(planted)) == {"work._completion"}


def test_public_functions_create_no_completion_directly() -> None:
    """Check that no public function calls `Completion`, whose constructor records a source line by stack depth."""
    users = {getattr(aiocoll, name) for name in aiocoll.__all__} | {
        getattr(aiocoll.distributed, name) for name in aiocoll.distributed.__all__
    }
    makers = {
        each.__qualname__
        for each in users
        if inspect.isclass(each) or inspect.isfunction(each)
        for node in ast.walk(ast.parse(inspect.getsource(each)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Completion")
    }
    assert not makers


def defined_names(name: str, *kinds: type[ast.stmt]) -> set[str]:
    """Return the public names that top-level statements of the given kinds define in a module."""
    found = set()
    for node in tree(name).body:
        if not isinstance(node, kinds):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        else:
            found.add(node.name)  # type: ignore[attr-defined]
    return {n for n in found if not n.startswith("_")}


def exported_names(name: str) -> set[str] | None:
    for node in tree(name).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            names = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            assert len(names) == len(set(names)), f"{name} exports a name twice"
            return set(names)
    return None


def test_every_module_lists_its_public_names_in_dunder_all() -> None:
    for name in MODULES:
        if not tree(name).body[1:]:
            continue
        names = exported_names(name)
        assert names is not None, f"{name} has no __all__"
        code = defined_names(name, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert code <= names, f"{name}: {code - names}: export them, or begin them with an underscore"
        imported = {
            alias.asname or alias.name
            for node in (each for top in tree(name).body for each in (top.body if is_type_checking(top) else [top]))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        strange = names - code - imported - defined_names(name, ast.Assign, ast.AnnAssign)
        assert not strange, f"{name}: {strange}: neither defined nor imported here"


def test_modules_take_time_and_randomness_from_the_runtime() -> None:
    for name in MODULES:
        if folder(name) in ("runtime", "cli", "testing"):
            continue
        for node in all_nodes(name):
            if isinstance(node, ast.Import | ast.ImportFrom):
                roots = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
                assert not roots & {"time", "random", "secrets"}, f"{name}, line {node.lineno}: take it from a Runtime"
            if isinstance(node, ast.Attribute):
                taken = node.attr in ("urandom", "uuid1", "uuid4")
                assert not taken, f"{name}, line {node.lineno}: take it from a Runtime"


def test_wait_for_is_not_used() -> None:
    """Forbid `asyncio.wait_for`, which can lose a result on Python 3.11; `asyncio.timeout` does not."""
    found = {
        name
        for name in MODULES
        if any(isinstance(node, ast.Attribute) and node.attr == "wait_for" for node in all_nodes(name))
    }
    assert not found


def run(code: str) -> str:
    """Run code in a new Python process; return the standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_names_in_dunder_all_of_the_package_exist() -> None:
    import aiocoll

    missing = [name for name in aiocoll.__all__ if not hasattr(aiocoll, name)]
    assert not missing


def test_import_loads_few_modules_until_a_public_name_is_used() -> None:
    """Keep `import aiocoll` fast: asyncio alone takes 50 ms on slow machines."""
    code = """
import sys
before = {*sys.modules}
import aiocoll
print(*({name.partition(".")[0] for name in sys.modules} - {name.partition(".")[0] for name in before}))
print(*(name for name in sys.modules if name.startswith("aiocoll.")))
assert aiocoll.new_group and "aiocoll.group.process_group" in sys.modules
print(*(name for name in sys.modules if name.startswith("aiocoll.")))
"""
    packages, light, loaded = (line.split() for line in run(code).split("\n"))
    assert {"asyncio", "logging", "msgpack", "ssl"}.isdisjoint(packages)
    assert len(light) <= 10
    edge = {name for name in loaded if folder(name.removeprefix("aiocoll.")) in HOUSES["edge"]}
    assert edge == {"aiocoll.shipped"}, "these modules of the edge load with the first group"
    assert not {name for name in imports("shipped") if folder(name) in HOUSES["edge"]}


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("aiocoll", "aiocoll.Backend.backend_list"),
        ("aiocoll.distributed", "aiocoll.distributed.Backend.backend_list"),
        ("aiocoll.backends", "aiocoll.backends.Backend.backend_list"),
        ("aiocoll.backends", "aiocoll.backends.Backend.default_device_backend_map['cuda']"),
        ("aiocoll.group.dispatch.devices", "{'cuda': 'nccl'}[aiocoll.group.dispatch.devices.devices.names()[0]]"),
        ("aiocoll.elements.adapters", "'nccl' * ('cupy' in aiocoll.elements.adapters.adapters)"),
        ("aiocoll.elements.adapters", "'nccl' * len(aiocoll.elements.adapters.adapters.attributes)"),
        ("aiocoll.store.registry", "'nccl' * (aiocoll.store.registry.stores.get('tcp') is not None)"),
    ],
)
def test_implementations_of_the_package_are_registered_whichever_module_is_imported_first(
    module: str, code: str
) -> None:
    assert run(f"import {module}; print('nccl' in {code})") == "True"


@pytest.mark.parametrize("name", [name for name in public_names.MODULES if name.count(".") == 1])
def test_public_module_is_an_attribute_after_the_import(name: str) -> None:
    assert run(f"import aiocoll; print({name}.__name__)") == name


def test_public_names_loaded_on_first_use_behave_like_other_public_names() -> None:
    code = """
import aiocoll
later = sorted({*aiocoll.__all__} - {*vars(aiocoll)})
assert {*aiocoll.__all__, "loops", "plugins", "__version__"} <= {*dir(aiocoll)}
assert aiocoll.plugins.commands and aiocoll.loops.LoopThread
import aiocoll.elastic_groups
namespace = {}
exec("from aiocoll import *", namespace)
assert all(namespace[name] is getattr(aiocoll, name) for name in aiocoll.__all__)
assert callable(aiocoll.elastic)
try:
    aiocoll.no_such_name
except AttributeError as error:
    assert str(error) == "module 'aiocoll' has no attribute 'no_such_name'"
    print(*later)
"""
    assert {*run(code).split()} == {*aiocoll.__all__} - {*aiocoll.errors.__all__}


def test_use_of_new_group_loads_no_heavy_package_and_starts_no_thread() -> None:
    code = f"""
import sys, threading, numpy, pathlib, asyncio
fds = pathlib.Path("/proc/self/fd")
def count(): return len(list(fds.iterdir())) if fds.exists() else 0
before = count()
import aiocoll; aiocoll.new_group
assert count() == before, "a file was opened"
assert threading.active_count() == 1, threading.enumerate()
print(*(name for name in {HEAVY} if name in sys.modules))
"""
    assert run(code) == ""


def test_use_of_new_group_loads_no_rarely_needed_modules() -> None:
    code = f"""
import sys, asyncio, numpy
before = set(sys.modules)
import aiocoll; aiocoll.new_group
print(*(name for name in {LATER} if name in sys.modules and name not in before))
"""
    assert run(code) == ""


def test_all_modules_can_be_imported_without_extras() -> None:
    left = ("aiocoll", "__main__", "gpu.cupy_api", "torch")  # these need CuPy and torch; integrations need Ray or Dask
    names = [name for name in MODULES if name not in left and folder(name) not in ("testing", "integrations")]
    code = "\n".join(["import importlib", *(f"importlib.import_module('aiocoll.{name}')" for name in names)])
    assert run(code) == ""


def test_cupy_is_imported_by_only_one_module() -> None:
    def is_cupy(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").partition(".")[0] == "cupy"
        return isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "cupy" for alias in node.names)

    assert [name for name in MODULES if any(map(is_cupy, all_nodes(name)))] == ["gpu.cupy_api"]


def test_command_and_pytest_plugin_are_found_by_their_entry_points() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    where, name = project["scripts"]["aiocoll"].split(":")
    assert name in (exported_names(where.removeprefix("aiocoll.")) or ())
    assert project["entry-points"]["pytest11"]["aiocoll"].removeprefix("aiocoll.") in MODULES


def test_files_contain_no_absolute_paths_of_a_machine() -> None:
    machine = re.compile("|".join(("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/tm" + "p/")))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            assert not (found := machine.search(data.decode())), f"{name} mentions {found[0]}"
