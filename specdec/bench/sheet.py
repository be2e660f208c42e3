"""Rows of text as tables of a terminal: one where it is wide enough, several of the same rows where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_FRAME = 3
"""Characters beside a cell: its padding and a divider. The table has one more divider than columns."""


@dataclass
class Sheet:
    """keys: the columns that tell rows apart, repeated in each table; columns: the others. Cells may hold rich's markup."""

    title: str
    keys: Sequence[str]
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    caption: str | None = None

    def show(self, console: Console) -> None:
        """Print it so that no cell is cut off, as long as the keys fit beside the widest column."""
        for columns in self._parts(console.width):
            console.print(self._table(columns, console.width))
        if self.caption:
            console.print(f"[dim]{self.caption}[/]\n")

    def _parts(self, width: int) -> Iterator[list[int]]:
        """Columns by number, as many to a table as fit."""
        keys = list(range(len(self.keys)))
        taken = list(keys)
        for i in range(len(keys), len(keys) + len(self.columns)):
            if len(taken) > len(keys) and self._total([*taken, i]) > width:
                yield taken
                taken = list(keys)
            taken.append(i)
        yield taken

    def _total(self, columns: list[int]) -> int:
        return 1 + sum(self._least(i) + _FRAME for i in columns)

    def _least(self, i: int) -> int:
        """The width of a column whose cells stay whole; its heading may break between words."""
        return max(
            0, *(Text.from_markup(row[i]).cell_len for row in self.rows), *(len(word) for word in self._name(i).split())
        )

    def _name(self, i: int) -> str:
        return [*self.keys, *self.columns][i]

    def _table(self, columns: list[int], width: int) -> Table:
        table = Table(title=self.title, box=box.SIMPLE_HEAD, title_justify="left")
        spare = max(0, width - self._total(columns))
        for i in columns:
            least = self._least(i)
            more = min(spare, max(0, len(self._name(i)) - least))  # so that headings break only where they must
            spare -= more
            table.add_column(
                Text(self._name(i)), justify="left" if self._name(i) == "method" else "right", width=least + more
            )
        for row in self.rows:
            table.add_row(*(row[i] for i in columns))
        return table
