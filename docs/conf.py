"""Settings of Sphinx, which `make docs` runs."""

import sys
from pathlib import Path

import gradwire

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import generate  # noqa: E402 - beside this file

project = "gradwire"
author = copyright = "The gradwire authors"
release = version = gradwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["generated"]  # is included by other pages
myst_heading_anchors = 3
default_role = "py:obj"
highlight_language = "none"  # of blocks that name none
autodoc_mock_imports = ["accelerate", "lightning", "ray", "transformers"]
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"gradwire {release}"
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["glossary.css", "tables.css"]

generate.write(HERE / "generated")
