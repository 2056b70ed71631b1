"""Median networks as C, for hatch_build.py to compile."""

from typing import Any


def network_in_c(network: Any) -> str:
    """The network for a window as two functions: one sorts the pixels of each column, the other finds the middle of those of neighbours."""
    size = network.size
    columns: dict[int, int] = {}
    first, second, shifted = [], [], set()
    for number, (kind, one, other) in network.used.items():
        axis, shift = divmod(other, size)
        if kind == "shift" and axis == 0:
            first.append(f"float v{number} = at[{shift}][i];")
        elif kind == "shift":
            column = columns.setdefault(one, len(columns))
            second.append(f"float v{number} = sorted[{column}][i + {shift}];")
            shifted.add(number)
        else:
            text = f"float v{number} = {'LESSER' if kind == 'min' else 'GREATER'}(v{one}, v{other});"
            is_second = bool({one, other} & shifted)
            (second if is_second else first).append(text)
            shifted |= {number} if is_second else set()
    first += [f"sorted[{column}][i] = v{number};" for number, column in columns.items()]
    second.append(f"out[i] = v{network.result};")
    return _function(
        f"sort_columns_{size}(const float *const *at, ptrdiff_t n, float *const *sorted)", first
    ) + _function(f"middle_{size}(float *const *sorted, ptrdiff_t n, float *out)", second)


def _function(head: str, lines: list[str]) -> str:
    body = "\n    ".join(lines)
    return f"INLINE {head} {{\n#pragma GCC ivdep\n  for (ptrdiff_t i = 0; i < n; i++) {{\n    {body}\n  }}\n}}\n"
