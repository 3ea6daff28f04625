"""Write docs/flags.md from the declarations of the flags: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from megatron.packed.arguments.documentation import flags_page  # noqa: E402


def main() -> None:
    """Write the page."""
    path = REPOSITORY / "docs" / "flags.md"
    path.write_text(flags_page(), encoding="utf-8")
    print(f"wrote {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
