from __future__ import annotations

import tomllib

from cubroker.server.config.lines import places

TEXT = '''# a comment

a = 1
b.c = "x # y"
d = [
    1,  # one
    2,
]
e = """
a = 2
[no]
"""

[f] # a header
g = { h = 1, i = { j = 2 } }

[f."k.l"]
m = 1
[n.o]
'''


def test_every_key_and_table_has_the_line_where_it_begins() -> None:
    assert tomllib.loads(TEXT)
    assert places(TEXT) == {
        ("a",): 3,
        ("b",): 4,
        ("b", "c"): 4,
        ("d",): 5,
        ("e",): 9,
        ("f",): 14,
        ("f", "g"): 15,
        ("f", "g", "h"): 15,
        ("f", "g", "i"): 15,
        ("f", "g", "i", "j"): 15,
        ("f", "k.l"): 17,
        ("f", "k.l", "m"): 18,
        ("n",): 19,
        ("n", "o"): 19,
    }
