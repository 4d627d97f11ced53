"""The long description of the package: README and changelog, with links that work outside of the repository.

All else is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def absolute_links(text: str, repository: str, folder: str = "") -> str:
    """Relative links as addresses of files in the repository; ``folder`` is the page's own, with a slash."""
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\g<1>{repository}/blob/main/{folder}", text)


def long_description() -> str:
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    readme, changelog = (ROOT / "README.md").read_text(), (ROOT / "docs" / "changelog.md").read_text()
    return absolute_links(readme, repository) + "\n" + absolute_links(changelog, repository, "docs/")


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown")
