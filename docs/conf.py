"""Sphinx's configuration: `make docs` builds the site from the pages of this folder and the docstrings.

The pages are plain Markdown, which can also be read without Sphinx. Only the site has `index.rst`, the tree of all
pages, and `reference/`, which selects the documented names. `tests/test_site.py` builds the site.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import aiocoll
from aiocoll.group.flight_recorder import FlightRecorder
from aiocoll.group.interceptors.estimate import Estimate, Predicted

project = "aiocoll"
author = "the authors of aiocoll"
release = version = aiocoll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4  # links such as guide.md#options

html_theme = "furo"
html_title = f"aiocoll {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

# -- docstrings

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
# The site builds without these packages, which aiocoll.integrations and aiocoll.metrics import.
autodoc_mock_imports = ["dask", "distributed", "opentelemetry", "prometheus_client", "ray", "torch"]
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
default_role = "py:obj"  # `pg.allreduce` in a docstring becomes a link if it is a name of aiocoll
nitpicky = True
#: Links are required only for names of aiocoll, not for types in signatures and other text in single backticks.
nitpick_ignore_regex = [("py:class|py:data|py:exc", ".*"), ("py:obj", r"(?!(aiocoll|[A-Z]\w+)\.).*")]

#: Classes whose instances programs get from calls: their constructors are hidden.
HANDED_OUT = (aiocoll.ProcessGroup, aiocoll.Work, FlightRecorder, Estimate, Predicted)
#: Public names in the reference, by the private module path in signatures, or by the bare class name in docstrings.
PUBLIC = {
    **{
        f"{found.__module__}.{name}": f"aiocoll.{name}"
        for name, found in vars(aiocoll).items()
        if inspect.isclass(found)
    },
    **{cls.__name__: f"{cls.__module__}.{cls.__name__}" for cls in HANDED_OUT if cls.__name__ not in aiocoll.__all__},
}


def prepare(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText: diagrams, code, and sections that Sphinx does not know."""
    if name.startswith("aiocoll.BlockingGroup.") and hasattr(obj, "__wrapped__"):
        lines[1:] = ["", f"Waits for `ProcessGroup.{obj.__name__}`, which has the details, and returns its result."]
    lines[:] = to_rst("\n".join(lines), parameters(obj)).splitlines()


def skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Hide members of a class that are listed as attributes in its docstring."""
    document = app.env.current_document
    if what not in ("class", "exception") or not document.autodoc_class:
        return None
    cls = pkgutil.resolve_name(f"{document.autodoc_module}:{document.autodoc_class}")
    section = re.search(r"^Attributes:\n((?: .*\n|\n)*)", f"{inspect.getdoc(cls)}\n", re.MULTILINE)
    return True if section and re.search(rf"^    {name}:", section[1], re.MULTILINE) else None


def sign(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Hide constructors that are not for programs, and placeholders of omitted arguments."""
    if obj in HANDED_OUT:
        return "", ""
    if signature and "~typing.~" in signature:  # types that Sphinx cannot show
        bare = [each.replace(annotation=each.empty) for each in inspect.signature(obj).parameters.values()]
        return str(inspect.Signature([each for each in bare if each.name != "self"])), returns
    return signature and signature.replace("_Unset.UNSET", "..."), returns


def parameters(obj: Any) -> set[str]:
    """Return the parameter names of a function or class; an empty set for other objects."""
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def to_rst(text: str, arguments: set[str]) -> str:
    """Return a docstring as reStructuredText."""
    text = re.sub(r"^(Cost|Source): ", r":\1: ", text, flags=re.MULTILINE)
    # Indented blocks before the first section are code or diagrams.
    head, *sections = re.split(r"^(?=(?:Attributes|Args|Returns|Yields|Raises):$)", text, flags=re.MULTILINE)
    head = re.sub(r"^(?! )(.+\n)\n((?: {4}.*\n?|\n)+)", to_code_block, head, flags=re.MULTILINE)
    text = head + "".join(sections)
    # A parameter name must not link to an attribute of the same name.
    return re.sub(r"(?<!`)`(\w+)`(?!`)", lambda found: f"``{found[1]}``" if found[1] in arguments else found[0], text)


def to_code_block(found: re.Match[str]) -> str:
    """Return a line, and the indented block after it as a code block."""
    try:
        compile(textwrap.dedent(found[2]), "<docstring>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        language = "python"
    except SyntaxError:
        language = "text"
    return f"{found[1]}\n.. code-block:: {language}\n\n{found[2]}"


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Resolve links to names with a private module path, as in signatures, and to names without `aiocoll.`."""
    target = node.get("reftarget", "")
    domain = env.domains.python_domain
    for name in (PUBLIC.get(target, ""), f"aiocoll.{target}"):
        if name in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)
    return contnode if exists(target if target.startswith("aiocoll.") else f"aiocoll.{target}") else None


def exists(name: str) -> bool:
    """Return whether an object with this name exists, public or not."""
    with contextlib.suppress(ImportError, ValueError):
        if (
            importlib.util.find_spec(name) is not None
        ):  # a module, whose import may need packages that are not installed
            return True
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        pkgutil.resolve_name(name)
        return True
    return False


def unlink_paths(app: Sphinx, doctree: nodes.document) -> None:
    """Replace links of the README by names of files, which `link_paths` links: files have other paths on the site."""
    if app.env.docname == "index":
        for link in list(doctree.findall(pending_xref)):
            link.replace_self(nodes.literal("", link.astext()))


def link_paths(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Turn page names such as `docs/guide.md` into links; readers of the source find the file by the name."""
    for literal in list(doctree.findall(nodes.literal)):
        if found := re.fullmatch(r"(docs/|bench/)?([\w-]+)\.md", literal.astext()):
            target = found[2] if found[1] == "docs/" else f"project/{found[2]}"
            if target in app.env.found_docs and not isinstance(literal.parent, nodes.reference):
                uri = app.builder.get_relative_uri(page, target)
                literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=True, refuri=uri))


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx's events."""
    app.connect("autodoc-process-docstring", prepare, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-signature", sign)
    app.connect("doctree-read", unlink_paths)
    app.connect("doctree-resolved", link_paths)
    app.connect("missing-reference", resolve)
