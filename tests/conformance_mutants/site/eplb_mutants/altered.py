"""Plans with other columns, as a faulty backend would read them."""

from __future__ import annotations

from dataclasses import replace


def receiving(plan, keep=None, **columns):
    """Return the plan with other columns of receives, or only the rows of a mask."""
    moves = replace(plan.receives, **columns)
    if keep is not None:
        moves = type(moves)(*(getattr(moves, name)[keep] for name in moves.__dataclass_fields__))
    return replace(plan, receives=moves)


def reading_elsewhere(backend, plan, rows):
    """Let a backend's transfer read other rows than the live ones."""
    kept, backend.buffers = backend.buffers, replace(backend.buffers, rows=rows)
    try:
        return super(type(backend), backend).transfer(plan)
    finally:
        backend.buffers = kept
