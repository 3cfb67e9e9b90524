"""The documentation site: `make docs` builds it into build/docs, without a network, and a warning is an error."""

import contextlib
import io
import os
import sys
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import hf_fastattn  # noqa: E402
from hf_fastattn import cli  # noqa: E402

project = "hf_fastattn"
release = hf_fastattn.__version__
html_title = f"{project} {release}"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
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
        os.environ["COLUMNS"] = "100"
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*self.arguments[0].split(), "--help"])
        if not text.getvalue():
            raise self.error(f"`hf-fastattn {self.arguments[0]} --help` printed nothing.")
        shown = text.getvalue().replace(f"{ROOT}/", "")
        return [nodes.literal_block(shown, shown, language="text")]


def setup(app):
    app.add_directive("command-help", CommandHelp)
