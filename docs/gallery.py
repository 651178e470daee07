"""Draw the thumbnails of the gallery from pictures of the documentation: python docs/gallery.py.

The pictures are those that the notebooks store, and those in docs/images.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
SIZE = (360, 240)
#: Which picture of each notebook, counted from 0.
NOTEBOOKS = {"choosing": 0, "clustering": 0, "federation": 1, "loss": 1, "table": 0, "theorems": 0}
IMAGES = ("algorithm-1", "demo", "report", "reproduction-3", "reproduction-6")


def pictures(name: str) -> list[bytes]:
    """All pictures that a notebook shows."""
    cells = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    found = [output.get("data", {}).get("image/png") for cell in cells
             for output in cell.get("outputs", [])]
    return [base64.b64decode("".join(data)) for data in found if data]


def thumbnail(picture: bytes) -> Image.Image:
    """A picture in the middle of a white card, as large as fits."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail(SIZE, Image.Resampling.LANCZOS)
    card = Image.new("RGB", SIZE, "white")
    card.paste(image, ((SIZE[0] - image.width) // 2, (SIZE[1] - image.height) // 2))
    return card.quantize(64, dither=Image.Dither.NONE)


def main() -> None:
    folder = DOCS / "images" / "gallery"
    folder.mkdir(exist_ok=True)
    sources = {name: pictures(name)[k] for name, k in NOTEBOOKS.items()}
    sources |= {name: (DOCS / "images" / f"{name}.png").read_bytes() for name in IMAGES}
    for name, picture in sources.items():
        thumbnail(picture).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
