"""`coterie fit` on a table and its predictions of other rows.

Run as a script, with the folder of another version of coterie in PYTHONPATH, it does the same with
that version: `python one_fit.py FILE`, where FILE holds the arguments and gets the answer.
"""

import json
import sys
from pathlib import Path
from typing import Any

LEVEL = 0.9  # of intervals


def fit_and_predict(train: Any, test: Any, user: str, target: str, task: str,
                    ) -> dict[str, list[Any]]:
    """The columns of `predict`, with `low` and `high` where that version of coterie has them."""
    import coterie
    from coterie.data.frames import to_frame

    fitted: Any = coterie.fit_table(to_frame(train), user=user, target=target, task=task)
    test = to_frame(test)
    try:
        predicted = fitted.predict(test, interval=LEVEL)
    except (TypeError, coterie.InvalidInput):  # classes, some kinds of fits, an older version
        predicted = fitted.predict(test)
    columns: dict[str, list[Any]] = predicted.to_dict(as_series=False)
    return columns | {"kind": [str(fitted.kind)]}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps(fit_and_predict(*json.loads(file.read_text("utf-8")))), "utf-8")
