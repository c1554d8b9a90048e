"""Documents with generated parts: text between `<!-- name -->` and `<!-- /name -->`."""

from pathlib import Path


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->`, at the end where there is no such place."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if opening not in before:
        before = f"{before.rstrip()}\n\n{opening}\n{closing}\n".lstrip()
    head, rest = before.split(opening, 1)
    tail = rest.split(closing, 1)[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")  # another writer of the same document may be reading
    fresh.write_text(f"{head}{opening}\n{text.strip()}\n{closing}{tail}", encoding="utf-8")
    fresh.replace(path)
