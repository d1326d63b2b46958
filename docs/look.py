"""Pictures of pages of the site, at two widths, light and dark: `python docs/look.py build/docs FOLDER [PAGE ...]`.

Needs Playwright and Chromium. Names every page that is wider than its window, which only code and tables may be, each
inside a box of its own that scrolls.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = {"phone": 390, "desk": 1280}
#: What sticks out to the right of the window, and no box around it scrolls.
OUTSIDE = """() => [...document.querySelectorAll("article *")].filter(each => {
    if (each.getBoundingClientRect().right <= innerWidth + 1) return false
    for (let box = each; box; box = box.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(box).overflowX)) return false
    return true
}).map(each => each.tagName + " " + each.textContent.slice(0, 60))"""


def main(site: Path, folder: Path, pages: list[str]) -> None:
    """Look at the pages that are named, or at all for what sticks out."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if "_modules" not in path.parts)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, width in WIDTHS.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                for each in pages or found:
                    page.goto((site / each).resolve().as_uri())
                    for what in page.evaluate(OUTSIDE) if scheme == "light" else []:
                        print(f"{each} at {width}: {what}")
                    if pages:
                        page.screenshot(path=folder / f"{each.replace('/', '-')[:-5]}-{name}-{scheme}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
