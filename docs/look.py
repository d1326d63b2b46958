"""Screenshots of the site's pages, at two widths, light and dark: `python -m docs.look build/docs FOLDER PAGE ...`.

Needs Chromium. Without a page, it only prints elements that reach beyond the window, of all pages. Code and tables
may be wider in a box that scrolls. `tests/test_site.py` checks this too.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser import SCHEMES, WIDTHS, browser


def main(site: Path, folder: Path, pages: list[str]) -> None:
    """Save screenshots of `pages`, and print elements wider than the window. Without `pages`, only check all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if "_modules" not in path.parts)
    with tempfile.TemporaryDirectory() as kept, browser(Path(kept)) as opened:
        for name, width in WIDTHS.items():
            for scheme in SCHEMES if pages else SCHEMES[:1]:
                with opened.page(width, scheme) as page:
                    for each in pages or found:
                        page.open((site / each).resolve().as_uri())
                        for what in page.hidden_elements("article"):
                            print(f"{each} at {width}: {what}")
                        if pages:
                            page.save_picture(folder / f"{each.replace('/', '-')[:-5]}-{name}-{scheme}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
