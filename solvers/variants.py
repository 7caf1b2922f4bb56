"""States of each variant of the reuse problem, and their transitions by chunks.

With one list of items, every chunk costs the same in any position. With three lists, a chunk alone,
a first and a later chunk have different costs. A limit on the number of chunks adds a row per
number of chunks.
"""

from __future__ import annotations

from ucudnn.solvers.sweep import Arc, Rows

# Roles of a chunk: alone, first of several, one of the rest; ANY where the role does not matter.
SINGLE, FIRST, LATER, ANY = range(4)


def one_list(max_chunks: int | None) -> Rows:
    """Rows for chunks that cost the same alone or among others; row c: at most c chunks.

    >>> one_list(None).arcs[ANY]
    (Arc(source=0, target=0, start=0, stop=None),)
    """
    if max_chunks is None:
        # Without a cap nothing has to be remembered: one state, which every chunk leads back to.
        arcs: tuple[Arc, ...] = (Arc(0, 0),)
    else:
        arcs = tuple(Arc(c - 1, c) for c in range(1, max_chunks + 1))
    return Rows(
        count=len(arcs) + (max_chunks is not None),
        # "At most c" includes none, so batch 0 costs nothing in every row.
        start=range(len(arcs) + (max_chunks is not None)),
        # An item that costs no less than what this row has for its size can be replaced by that in
        # every split.
        gate={ANY: arcs[0].target},
        arcs={ANY: arcs},
        final=arcs[-1].target,
        chain=0 if max_chunks is None else None,
    )


def three_lists(max_chunks: int | None) -> Rows:
    """Rows for three lists: later chunks only; one first chunk and later ones; the answer.

    The answer has a row of its own, because a first chunk by itself is not a split.

    >>> rows = three_lists(None)
    >>> rows.count, rows.chain, rows.final
    (3, 1, 2)
    """
    if max_chunks is None:
        return Rows(
            count=3,
            start=(0,),
            gate={SINGLE: 2, FIRST: 1, LATER: 0},
            arcs={
                # Only from batch 0, as a lone chunk has no others.
                SINGLE: (Arc(0, 2, stop=1),),
                # Later chunks may be inserted before the first one: the order of a sum does not
                # matter. The answer needs at least one of them, hence start=1.
                FIRST: (Arc(0, 1), Arc(0, 2, start=1)),
                LATER: (Arc(0, 0), Arc(1, 1), Arc(1, 2)),
            },
            final=2,
            chain=1,
        )
    return _three_lists_capped(max_chunks)


def _three_lists_capped(cap: int) -> Rows:
    """Row c < cap: at most c later chunks. Row cap - 1 + c: a first one among at most c chunks."""
    final = 2 * cap - 1
    later = [Arc(c - 1, c) for c in range(1, cap)]
    both = [Arc(cap - 2 + c, cap - 1 + c) for c in range(2, cap)]
    first = [Arc(c - 1, cap - 1 + c) for c in range(1, cap)]
    # A cap of 1 leaves lone chunks only.
    several = cap > 1
    return Rows(
        count=final + 1,
        start=range(cap),
        gate={SINGLE: final, FIRST: cap, LATER: 1},
        arcs={
            SINGLE: (Arc(0, final, stop=1),),
            FIRST: (*first, Arc(cap - 1, final, start=1)) if several else (),
            LATER: (*later, *both, Arc(final - 1, final)) if several else (),
        },
        final=final,
        chain=None,
    )
