"""The documentation site: `make docs` builds it into build/docs, without a network, and a warning is an error."""

import contextlib
import io
import os
import sys
import tomllib
from pathlib import Path

import latex2mathml.converter
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import hf_fastattn  # noqa: E402
import hf_fastattn_cli as cli  # noqa: E402

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
project = "hf_fastattn"
author = "the hf_fastattn developers"
copyright = author
release = hf_fastattn.__version__
html_title = f"{project} {release}"
html_theme = "furo"
html_theme_options = {"source_repository": URLS["Repository"], "source_branch": "main", "source_directory": "docs/"}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["filter.js"]
html_math_renderer = "mathml"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
default_role = "code"  # docstrings are plain text with `names`

# Links into other projects' references read their inventories over the network: set DOCS_INTERSPHINX=1 where there is one.
if os.environ.get("DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "transformers": ("https://huggingface.co/docs/transformers/main/en", None),
    }


class CommandHelp(SphinxDirective):
    """`{command-help} generate` shows the output of `hf-fastattn generate --help`."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        text = io.StringIO()
        os.environ["COLUMNS"] = "88"
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*self.arguments[0].split(), "--help"])
        if not text.getvalue():
            raise self.error(f"`hf-fastattn {self.arguments[0]} --help` printed nothing.")
        shown = text.getvalue().replace(f"{ROOT}/", "")
        return [nodes.literal_block(shown, shown, language="text")]


def formula(writer, node):
    """A formula as MathML, which browsers typeset without a script."""
    display = "inline" if isinstance(node, nodes.math) else "block"
    writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(formula, None), block_renderers=(formula, None))
    app.add_directive("command-help", CommandHelp)
