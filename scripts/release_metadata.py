"""Write the repository's address into pyproject.toml and README.md of a checkout that is about to be released.

    python scripts/release_metadata.py --repository https://host/owner/gradcomp --ref v0.1.0

The address is not a part of the source: a hosted CI knows its own. ``[project.urls]`` is added, and the README's
relative links become absolute ones, since an index shows the README without the files beside it. A link to a file that
is not there is an error. Do not commit the result.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

_BEFORE = "[project.scripts]\n"
_PICTURES = (".png", ".svg")
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute_links(text: str, root: Path, repository: str, ref: str) -> str:
    """The README with absolute links; ValueError, with all of them, for links to files that ``root`` lacks."""
    targets = [link[1].partition("#")[0] for link in _LINK.finditer(text)]
    missing = sorted({target for target in targets if not (root / target).exists()})
    if missing:
        raise ValueError(f"README.md links to files that are not there: {', '.join(missing)}")

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith(_PICTURES) else "blob"
        return f"]({repository}/{kind}/{ref}/{link[1]})"

    return _LINK.sub(absolute, text)


def with_urls(text: str, repository: str, ref: str) -> str:
    """pyproject.toml with ``[project.urls]``; ValueError if there is one or the place for it is not found."""
    if "urls" in tomllib.loads(text)["project"]:
        raise ValueError("pyproject.toml has [project.urls] already")
    if text.count(_BEFORE) != 1:
        raise ValueError(f"pyproject.toml does not have one {_BEFORE.strip()}")
    urls = {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Documentation": f"{repository}/blob/{ref}/docs/index.md",
        "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return text.replace(_BEFORE, f"[project.urls]\n{table}\n{_BEFORE}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", required=True, help="address of the repository")
    parser.add_argument("--ref", required=True, help="tag that links point to")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    options = parser.parse_args()
    if not re.fullmatch(r"https://[^\s\"]+[^\s\"/]", options.repository):
        parser.error(f"{options.repository} is no https address without a slash at its end")
    project, readme = options.root / "pyproject.toml", options.root / "README.md"
    try:
        urls = with_urls(project.read_text(), options.repository, options.ref)
        text = absolute_links(readme.read_text(), options.root, options.repository, options.ref)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    project.write_text(urls)
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
