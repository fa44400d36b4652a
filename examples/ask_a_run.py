"""Three queries about a run, in SQL over the tables of `lockstep export`.

    lockstep export runs/chat --out tables
    python examples/ask_a_run.py tables

This example uses polars. DuckDB reads the same files: replace each table by its path, as in FROM
'tables/batches.parquet'.
"""

import sys
from pathlib import Path

import polars as pl

QUESTIONS = {
    "How much slower are batches with prompts for the requests that decode in them?": """
        SELECT mode,
               COUNT(*) AS batches,
               ROUND(AVG(finished_us - started_us) / 1000.0, 2) AS ms_mean,
               ROUND(AVG(prefill_tokens), 0) AS prompt_tokens,
               ROUND(AVG(rows - extend_rows), 1) AS decodes
        FROM batches GROUP BY mode ORDER BY batches DESC""",
    "What stopped the waiting queue, and how many tokens were lacking?": """
        SELECT reason,
               COUNT(*) AS times,
               COUNT(DISTINCT request_id) AS requests,
               ROUND(AVG(needed_tokens - available_tokens), 0) AS tokens_lacking
        FROM decisions WHERE type = 'AdmissionDeferred' GROUP BY reason ORDER BY times DESC""",
    "How many prompt tokens were computed more than once, and how long did these requests take?": """
        SELECT retractions,
               COUNT(*) AS requests,
               SUM(computed - (prompt_tokens - cached_tokens)) AS tokens_again,
               ROUND(AVG(e2e_us) / 1e6, 2) AS e2e_s_mean
        FROM (SELECT request_id, SUM(stop - start) AS computed FROM parts WHERE extends GROUP BY request_id) AS work
        JOIN requests ON work.request_id = requests.request_id
        GROUP BY retractions ORDER BY retractions""",
}


def main(folder: Path) -> None:
    """Print one table for each query."""
    tables = pl.SQLContext({path.stem: pl.scan_parquet(path) for path in sorted(folder.glob("*.parquet"))})
    with pl.Config(tbl_rows=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
        for question, sql in QUESTIONS.items():
            print(question)
            print(tables.execute(sql, eager=True))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/ask_a_run.py TABLES")
    main(Path(sys.argv[1]))
